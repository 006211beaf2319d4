"""The faults of tests/breakages.py fit the sources, and the committed run saw each."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.breakages import BREAKAGES, RESULT, ROOT, Breakage


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.what)
def test_a_breakage_fits_the_sources(breakage: Breakage) -> None:
    text = (ROOT / "src" / "decent_dp" / breakage.file).read_text(encoding="utf-8")
    assert text.count(breakage.old) == 1, f"{breakage.file} has changed; write the fault anew and run `make breakages`"


def test_the_committed_run_saw_each_breakage() -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))
    seen = [row.pop("seen_by") for row in rows]
    assert rows == [asdict(breakage) for breakage in BREAKAGES]
    assert all(seen)
