"""The faults of tests/breakages.py fit the sources."""

from __future__ import annotations

import pytest

from tests.breakages import BREAKAGES, ROOT, Breakage


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_breakage_fits_the_sources(breakage: Breakage) -> None:
    text = (ROOT / "src" / "decent_dp" / breakage.file).read_text(encoding="utf-8")
    assert text.count(breakage.old) == 1, f"{breakage.file} has changed; write the fault anew and run `make breakages`"
