"""Kernels in Triton: GossipAdamW's on the interpreter, compared with the form in torch; and devices without Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decent_dp import _triton
from decent_dp.optim import AccumAdamW, GossipAdamW
from tests.helpers import ROOT

# Of parameters that have no one order of memory, or options that the kernel does not have.
NOT_TAKEN = {"GossipAdamW gaps", "GossipAdamW amsgrad"}


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
    assert len(found) == 19
    for name, (difference, taken) in found.items():
        # The interpreter rounds to bfloat16 towards zero.
        limits = {"bfloat16": 2**-7, "float16": 2**-9, "float64": 1e-14}
        limit = next((limits[kind] for kind in limits if kind in name), 1e-6)
        assert difference <= limit, name
        assert (taken > 0) == (name not in NOT_TAKEN), name


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices on which some kernels were tried."""
    tried: list[torch.device] = []
    module = types.ModuleType("tests.some_kernels")
    vars(module)["attempt"] = lambda device, dtype: tried.append(device)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _triton.load_triton.cache_clear()
    yield tried
    _triton.load_triton.cache_clear()


def load(device: str) -> Any:
    return _triton.load_triton("tests.some_kernels", torch.device(device), torch.float32)


def test_only_gpus_are_used(attempts, monkeypatch):
    assert load("cuda:0") is load("cuda:0") is sys.modules["tests.some_kernels"]
    assert load("cpu") is None
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert load("cuda:1") is None
    assert attempts == [torch.device("cuda:0")]


@pytest.mark.parametrize("broken", ["kernels", "import"])
def test_a_device_on_which_triton_fails_is_reported_once_and_not_used(attempts, broken, monkeypatch):
    if broken == "import":
        monkeypatch.setitem(sys.modules, "tests.some_kernels", None)
    else:
        vars(sys.modules["tests.some_kernels"]).pop("attempt")
    with pytest.warns(RuntimeWarning, match="some_kernels for torch.float32 does not work on cuda:0, and takes"):
        assert load("cuda:0") is None
    assert load("cuda:0") is None  # warnings are errors


def test_a_step_refuses_to_be_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight = torch.nn.Parameter(torch.ones(3))
    gossip = GossipAdamW([weight])
    gossip.set_replicas(4)
    for optimizer in (gossip, AccumAdamW([weight])):
        with pytest.raises(RuntimeError, match=f"a CUDA graph is being captured, and the step of {type(optimizer).__name__}"):
            optimizer.step()
