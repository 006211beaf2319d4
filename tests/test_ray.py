"""Ray Train: GossipConfig, in a real cluster on this machine."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from textwrap import indent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from decent_dp.transport.addresses import address_of
from tests.framework_cases import Run, assert_equal_runs, plain_loop, quiet_frameworks
from tests.ray_cases import EPOCHS, OPTIONS, ROOT, cluster, fit, ray_environment
from tests.test_docs import blocks, shown_by

pytest.importorskip("ray")


def plain(rank: int, n: int, batches: list[list[list[int]]], saves: list[int]) -> Run:
    quiet_frameworks()
    return plain_loop(batches[rank], saves=saves, **OPTIONS)


def in_ray(rank: int, n: int, out: str) -> dict[str, Any]:
    quiet_frameworks()
    found: dict[str, Any] = {}
    with cluster():
        found["plain"] = fit(Path(out, "plain"))
        began = time.monotonic()
        found["killed"] = fit(Path(out, "killed"), failures=1, kill=True, timeout_s=3600)
        found["seconds"] = time.monotonic() - began
        found["resumed"] = fit(Path(out, "killed"), kill=True)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_in_ray_equal_the_plain_loop_and_survive_killed_workers(workers, tmp_path):
    (found,) = workers(1, in_ray, str(tmp_path), timeout=900)
    ended, error = found["plain"]
    assert error == ""
    batches = [worker["batches"] for worker in ended]
    assert len(batches) == 2
    assert sorted(i for own in batches for batch in own for i in batch) == sorted(list(range(64)) * EPOCHS)
    expected = workers(2, plain, batches, [])
    for rank, (worker, run) in enumerate(zip(ended, expected, strict=True)):
        assert_equal_runs(Run(**worker["run"]), run)
        assert worker["collectives"] == []
        about = worker["about"]
        assert about["environment"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert (about["timeout"], about["threads"], about["main thread"]) == (120, 1, False)
        assert about["refused"].endswith("With Ray Train call prepare_model(model, parallel_strategy=None).")

    # Killed, started again by Ray, killed again: an end, long before the timeout, that names the worker.
    ended, error = found["killed"]
    assert ended == []
    assert "PeerLostError: worker 1 is gone" in error
    assert found["seconds"] < 1800

    # The same run, called again, after the two epochs of the starts before.
    ended, error = found["resumed"]
    assert error == ""
    each = len(batches[0]) // EPOCHS
    expected = workers(2, plain, batches, [each * epoch for epoch in range(1, EPOCHS)])
    for worker, run in zip(ended, expected, strict=True):
        assert worker["about"]["first"] == EPOCHS - 1
        assert_equal_runs(Run(**worker["run"]), run)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_script_on_the_page_runs(tmp_path):
    (block,) = blocks(ROOT / "docs" / "ray.md", "python no-run")
    small = "import ray\n\nray.init(num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20)\n"
    head, main = block.code.split('if __name__ == "__main__":\n')
    code = f'{head}if __name__ == "__main__":\n{indent(small, "    ")}{main}'
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        environ = {**os.environ, **ray_environment(), "HOME": str(tmp_path), "RAY_TMPDIR": folder}
        command = [sys.executable, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr
    (shown,) = shown_by(block.code)
    assert any(line.startswith(shown.rstrip("…")) for line in done.stdout.splitlines()), done.stdout


# -- bad input ---------------------------------------------------------------------------------------------------------------


def imported(monkeypatch: Any, ray: Any) -> str:
    """The error of an import with this module in the place of Ray."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delitem(sys.modules, "decent_dp.integrations.ray", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("decent_dp.integrations.ray")
    return str(caught.value)


def test_without_ray_or_with_an_old_one_the_import_says_what_to_install(monkeypatch):
    old = ModuleType("ray")
    old.__version__ = "2.9.3"  # type: ignore[attr-defined]
    for ray, cause in ((None, "ray"), (old, "ray 2.9.3 is installed")):
        said = imported(monkeypatch, ray)
        assert said.startswith("decent_dp.integrations.ray needs Ray Train 2.60 or newer; pip install 'decent-dp[ray]'")
        assert cause in said
        assert "\n" not in said


def test_bad_arguments_and_shared_gpus_are_refused(monkeypatch):
    from decent_dp.integrations.ray import GossipConfig

    config = GossipConfig()
    assert (config.backend, config.timeout_s) == (None, 600)
    with pytest.raises(ValueError, match="backend must be 'gloo' or 'nccl', got 'mpi'"):
        GossipConfig(backend="mpi")
    with pytest.raises(ValueError, match="timeout_s"):
        GossipConfig(timeout_s=0)
    group = SimpleNamespace(get_resources_per_worker=lambda: {"GPU": 0.5})
    with pytest.raises(RuntimeError, match=r"gives each 0.5: .* GossipConfig\(backend='gloo'\)"):
        config.backend_cls().on_start(group, GossipConfig(backend="nccl"))


def test_workers_use_the_network_of_ray(monkeypatch):
    import ray.util

    from decent_dp.integrations.ray import _choose_interface

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert address_of("lo") == "127.0.0.1"
    assert address_of("none-such") is None
    for ours, one_node, chosen in (("127.0.0.1", False, "lo"), ("10.0.0.1", True, "lo"), ("198.51.100.7", False, None)):
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda ours=ours: ours)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        _choose_interface(one_node=one_node)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen  # on no interface: gloo's own choice
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    _choose_interface(one_node=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"  # what is set stays
