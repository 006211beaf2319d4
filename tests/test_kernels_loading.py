"""The form of int8 in Numba, where that is missing, turned off or broken, and where its cache cannot be written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decent_dp.compression import FlatTensor, Int8, MessageId, lattice
from decent_dp.compression.lattice import Lattice, load_numba

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(load_numba() is None, reason="needs Numba that compiles")


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
    return bytes(out.numpy()) + bytes([type(form._lattice) is not Lattice])


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
    assert load_numba() is None
    assert message()[-1] == 0
    assert caplog.text == ""


def test_a_broken_numba_is_said_once(fresh, caplog):
    def fail(name: str) -> Any:
        raise OSError("no LLVM here")

    fresh.setattr(lattice.importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING):
        assert [message()[-1] for _ in range(3)] == [0, 0, 0]
    [record] = caplog.records
    assert record.getMessage() == "Numba does not work, so that torch takes its place: OSError: no LLVM here"


def add(a: Any, b: Any) -> Any:
    return a + b


@pytest.mark.parametrize("failure", ["no folder", "full disk", "broken file"])
def test_a_cache_that_cannot_be_used(failure, monkeypatch, tmp_path):
    from numba.core import caching

    from decent_dp.compression.int8_numba import _compiled as compiled

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
