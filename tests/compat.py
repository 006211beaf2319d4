"""A pytest plugin for `make compat`: keeps the versions and counts of a passing run in docs/results/compat.json."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "compat.json"


def claimed() -> dict[str, str]:
    """The lower bounds that the installed metadata claims for users, by package: the core's and those of the extras."""
    found = {}
    for line in metadata.requires("decent-dp") or []:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:; extra == '(?:plots|cli|sim)')?", line)
        if match:
            found[match[1]] = match[2]
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-as", help="the name of this run in docs/results/compat.json")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    name = config.getoption("keep_as")
    if exitstatus != 0 or not name:
        return
    stats = terminalreporter.stats
    skips = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", []))
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept[name] = {
        "python": platform.python_version(),
        "packages": {package: metadata.version(package) for package in sorted(claimed())},
        "passed": len(stats.get("passed", [])),
        "skipped": dict(sorted(skips.items())),
    }
    RESULTS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"written: docs/results/compat.json ({sum(skips.values())} skipped)")
