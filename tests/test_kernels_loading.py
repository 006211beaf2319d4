"""Kernels of Numba where it is missing, turned off or broken, and where its cache cannot be written."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import decent_dp.kernels
from decent_dp.compression import COMPRESSIONS, FlatTensor, Int8, MessageId, on_cuda
from decent_dp.kernels import load_numba, tables

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(load_numba("int8_cpu") is None, reason="needs Numba that compiles")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is loaded yet."""
    load_numba.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    load_numba.cache_clear()


def message() -> bytes:
    values = [torch.arange(300.0), torch.ones(5)]
    form = Int8([FlatTensor(i, len(value)) for i, value in enumerate(values)], torch.float32, torch.device("cpu"))
    out = torch.full((form.nbytes,), 255, dtype=torch.uint8)
    for _ in form.encode(values, out, MessageId(3, 1), [form.hint(values)]):
        pass
    form.mix(values, out, out, 0.5)
    return bytes(out.numpy()) + bytes([form._fast is not None])


def test_without_numba_torch_codes(fresh, caplog):
    with_kernels = message()
    assert with_kernels[-1] == 1
    load_numba.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "numba"]:
        fresh.delitem(sys.modules, name)
    fresh.setitem(sys.modules, "numba", None)
    assert message() == with_kernels[:-1] + b"\0"
    assert caplog.text == ""


def test_numba_that_does_not_compile_is_not_used(fresh, caplog):
    fresh.setattr(numba.config, "DISABLE_JIT", 1)
    assert load_numba("int8_cpu") is None
    assert message()[-1] == 0
    assert caplog.text == ""


def test_a_broken_numba_is_said_once(fresh, caplog):
    def fail(name: str) -> Any:
        raise OSError("no LLVM here")

    fresh.setattr(decent_dp.kernels.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING):
        assert [message()[-1] for _ in range(3)] == [0, 0, 0]
    [record] = caplog.records
    assert record.getMessage() == "Numba does not work, so that torch takes its place: OSError: no LLVM here"


def test_kernels_change_with_what_compiles_them():
    """Numba would go on with what the old tools have compiled."""
    folder = Path(decent_dp.kernels.__file__).parent
    digest = hashlib.sha256((folder / "numba_tools.py").read_bytes()).hexdigest()[:12]
    for path in folder.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("from decent_dp.kernels.numba_tools import"):
                assert line.endswith(f"  # digest {digest}"), path.name


def add(a: Any, b: Any) -> Any:
    return a + b


@pytest.mark.parametrize("failure", ["no folder", "full disk", "broken file"])
def test_a_cache_that_cannot_be_used(failure, monkeypatch, tmp_path):
    from numba.core import caching

    from decent_dp.kernels.numba_tools import compiled

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    if failure == "no folder":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    elif failure == "full disk":
        monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full)
    else:
        assert compiled("int64(int64, int64)")(add)(2, 3) == 5
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 2
        for path in files:
            path.write_bytes(path.read_bytes()[:40])
    assert compiled("int64(int64, int64)")(add)(2, 3) == 5


# What two processes of training would load: kernels, their messages and mixed values.
_CODES = "import sys; from tests.test_kernels_loading import message; sys.stdout.write(message().hex())"


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[1]

    def together(count: int) -> set[str]:
        running = [
            subprocess.Popen([sys.executable, "-c", _CODES], env=environment, cwd=root, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        found = {process.communicate(timeout=300)[0] for process in running}
        assert [process.returncode for process in running] == [0] * count
        return found

    expected = message().hex()
    assert together(4) == {expected}
    files = sorted(path.name for path in tmp_path.rglob("*.nb?"))
    assert len(files) == 8
    assert together(2) == {expected}
    assert files == sorted(path.name for path in tmp_path.rglob("*.nb?"))
    assert not list(tmp_path.rglob("*.tmp.*"))


# -- kernels for CUDA ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "bfloat16", "int8"])
def test_kernels_of_messages_that_do_not_work_are_left_out(name, monkeypatch, caplog):
    """They are tried at construction: later they would fail in the middle of an exchange."""

    def fails(*_: object) -> None:
        raise ValueError("this Triton lacks something")

    broken = ModuleType("broken")
    vars(broken).update(TILE=8, Part=lambda *place: place, Tiles=fails)
    monkeypatch.setattr(on_cuda, "cuda_kernels", lambda *_: broken)
    on_cuda._works.cache_clear()
    coder = COMPRESSIONS[name]([FlatTensor(0, 5)], torch.float32, torch.device("cpu"))
    on_cuda._works.cache_clear()
    assert coder._on_cuda is None
    assert "do not work on cpu, so that exchanges take longer: " in caplog.text


def test_a_step_by_kernels_refuses_to_be_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tables.refuse_capture("AccumAdamW")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured, and the step of AccumAdamW cannot be part of it"):
        tables.refuse_capture("AccumAdamW")
