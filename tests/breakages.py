"""Ten faults, put into a copy of the sources one at a time: the fast tests must see each. `make breakages`.

The table and the rows are written to docs/results/. A fault that is not seen ends the command with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "results" / "breakages.json"


@dataclass(frozen=True)
class Breakage:
    """Replaces ``old``, which occurs once in ``file``, by ``new``."""

    what: str
    file: str
    old: str
    new: str


BREAKAGES = [
    Breakage(
        "the sign of the mix",
        "rules/base.py",
        "values.add_(difference)",
        "values.sub_(difference)",
    ),
    Breakage(
        "the last bucket is never exchanged",
        "engine/engine.py",
        "        if len(edge.ranks) > 1:\n            exchange_id, members",
        "        if len(edge.ranks) > 1 and not 0 < bucket.number == len(self.buckets) - 1:\n            exchange_id, members",
    ),
    Breakage(
        "the weight of the next round's edge",
        "engine/engine.py",
        "bucket.in_flight = InFlight(round_, edge, hint, handle,",
        "bucket.in_flight = InFlight(round_, self._topology.get_edge(round_.number + 1), hint, handle,",
    ),
    Breakage(
        "a worker that sits a round out counts no round",
        "engine/engine.py",
        "        self.round += 1",
        "        idle = any(b.in_flight is not None and b.in_flight.sits_out for b in self.buckets)\n"
        "        self.round += self._transport.world_size == 1 or not idle",
    ),
    Breakage(
        "the scale hint is one round late",
        "engine/bucket.py",
        "        now = self.compression.hint(proposal) if self.hint_next is None else self.hint_next\n",
        "        now = self.compression.hint(proposal)\n",
    ),
    Breakage(
        "an exchange counts as complete before its last message has come",
        "transport/tcp/exchange.py",
        "        if not self._messages_left:\n            self._done.set()",
        "        if self._messages_left <= 1:\n            self._done.set()",
    ),
    Breakage(
        "a lost peer is taken for one that sat out",
        "engine/engine.py",
        'return Outcome("lost", error)',
        "return SAT_OUT",
    ),
    Breakage(
        "a step that the scaler skips ends no round",
        "_gossip.py",
        "            self._stepped[number] += 1\n        self._scaled.clear()",
        "            pass\n        self._scaled.clear()",
    ),
    Breakage(
        "loaded values are mixed with the exchange of the old ones",
        "engine/bucket.py",
        "        self.stale |= names\n",
        "",
    ),
    Breakage(
        "a checkpoint forgets the exchange in flight",
        "engine/engine.py",
        'exchange["in_flight"] |= bucket.in_flight is not None',
        'exchange["in_flight"] |= False',
    ),
]


def apply(breakage: Breakage, root: Path) -> None:
    """Puts the fault into the sources under ``root``."""
    path = root / "src" / "decent_dp" / breakage.file
    text = path.read_text(encoding="utf-8")
    assert text.count(breakage.old) == 1, f"{breakage.what}: {breakage.file} has changed; write the fault anew"
    path.write_text(text.replace(breakage.old, breakage.new), encoding="utf-8")


def run(breakage: Breakage) -> dict[str, object]:
    """Runs the fast tests on a broken copy until one fails; ``seen_by`` is None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        apply(breakage, root)
        began = time.monotonic()
        words = [
            "-n",
            "auto",
            "--maxprocesses",
            "8",
            "--dist",
            "worksteal",
            "-m",
            "not slow",
            "--maxfail=1",
            "--tb=line",
            "-rfE",
        ]
        out = subprocess.run(
            # That test compares texts, and would see each.
            [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider", "--ignore=tests/test_breakages.py"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", out.stdout, re.MULTILINE)
        assert (out.returncode == 0) == (found is None), out.stdout[-3000:] + out.stderr[-3000:]
        return {**asdict(breakage), "seen_by": found and found[1], "seconds": round(time.monotonic() - began)}


def main() -> int:
    rows = []
    for breakage in BREAKAGES:
        rows.append(run(breakage))
        print(f"{breakage.what}: {rows[-1]['seen_by'] or 'NOT SEEN'} ({rows[-1]['seconds']} s)", flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["seen_by"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
