"""The optimizers' kernels for CUDA, on Triton's interpreter for the CPU, compared with the readable forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from decent_dp.kernels import tables

ROOT = Path(__file__).resolve().parents[1]
# Of parameters that have no one order of memory, or options that the kernels do not have.
NOT_TAKEN = {"AccumAdamW gaps", "GossipAdamW gaps", "GossipAdamW amsgrad"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernels_equal_the_readable_forms():
    pytest.importorskip("triton")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.optimizer_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 28
    for name, (difference, taken) in found.items():
        # The interpreter rounds to bfloat16 towards zero.
        limits = {"bfloat16": 2**-7, "float16": 2**-9, "float64": 1e-14}
        limit = next((limits[kind] for kind in limits if kind in name), 1e-6)
        assert difference <= limit, name
        assert (taken > 0) == (name not in NOT_TAKEN), name


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """In place of the kernel that tries a device."""
    module = types.ModuleType("decent_dp.kernels.probe")
    module.probe = lambda device: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tables, "DEVICES", {"cuda"})
    tables.usable.cache_clear()
    yield module
    tables.usable.cache_clear()


def test_a_device_on_which_triton_fails_is_reported_once_and_not_used(probe):
    def fails(_: torch.device) -> None:
        raise RuntimeError("no C compiler here\nand much else")

    probe.probe = fails
    with pytest.warns(RuntimeWarning, match="Triton does not work on cuda:0, so that .*: no C compiler here"):
        assert not tables.usable(torch.device("cuda:0"))
    assert not tables.usable(torch.device("cuda:0"))  # warnings are errors


def test_only_gpus_are_used(probe, monkeypatch):
    assert tables.usable(torch.device("cuda:0"))
    assert not tables.usable(torch.device("cpu"))
    tables.usable.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not tables.usable(torch.device("cuda:0"))


def test_without_triton_there_is_a_warning(probe, monkeypatch):
    monkeypatch.setitem(sys.modules, probe.__name__, None)
    with pytest.warns(RuntimeWarning, match="Triton does not work on cuda:0, so that exchanges and optimizers take longer"):
        assert not tables.usable(torch.device("cuda:0"))
