"""Faults that are put into a copy of the sources, one at a time: the fast tests must see each. `make breakages`.

Each fault is shown to the test that saw it the last time; if that passes now, to all fast tests, until one fails. In the end
these tests run without a fault, and must pass. The rows are written to docs/results/breakages.json. A fault that is not seen
ends the command with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "results" / "breakages.json"
# The Makefile passes how tests run in parallel.
ALONE = [sys.executable, "-m", "pytest"]
PYTEST = [*ALONE, *sys.argv[1:]]


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
        "rules/rule.py",
        "values.add_(difference)",
        "values.sub_(difference)",
    ),
    Breakage(
        "the last bucket is exchanged and not mixed",
        "engine/engine.py",
        "            bucket.mix(in_flight, self.factor)\n",
        "            if bucket is self.buckets[0] or bucket is not self.buckets[-1]:\n"
        "                bucket.mix(in_flight, self.factor)\n",
    ),
    Breakage(
        "the weight of the next round's edge",
        "engine/engine.py",
        "        bucket.in_flight = InFlight(round_, edge, handle,",
        "        following = bucket.topology.get_edge(round_.number + 1)\n"
        "        edge = following if len(following.ranks) > 1 and len(edge.ranks) > 1 else edge\n"
        "        bucket.in_flight = InFlight(round_, edge, handle,",
    ),
    Breakage(
        "a worker that sits a round out uses its edge of the round before",
        "engine/engine.py",
        "        proposal = bucket.propose(round_,",
        "        edge = edge if len(edge.ranks) > 1 or not self.round else bucket.topology.get_edge(self.round - 1)\n"
        "        proposal = bucket.propose(round_,",
    ),
    Breakage(
        "what is coded when the others' hints have come is not what was there at the start",
        "engine/bucket.py",
        "        torch._foreach_copy_(self._copies, proposal)\n        return self._copies\n",
        "        return proposal\n",
    ),
    Breakage(
        "a worker that sits a round out counts no round",
        "engine/engine.py",
        "        self.round += 1",
        "        idle = any(b.in_flight is not None and b.in_flight.sits_out for b in self.buckets)\n"
        "        self.round += self._transport.world_size == 1 or not idle",
    ),
    Breakage(
        "a message is coded with another scale hint than its peers have",
        "engine/engine.py",
        "        hint = bucket.compression.hint(proposal) if",
        "        hint = bucket.compression.hint([0.1 * value for value in proposal]) if",
    ),
    Breakage(
        "the request for the second bucket is lost",
        "transport/flow.py",
        "        receiving.granted = upto\n        self._start(link, receiving)",
        "        receiving.granted = upto\n        if receiving.key[1] != 1:\n            self._start(link, receiving)",
    ),
    Breakage(
        "an exchange counts as complete before its last message has come",
        "transport/handles.py",
        "        if self._left:\n            return\n        self._read.set()",
        "        if self._left > 1:\n            return\n        self._read.set()",
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
        "a save drops what is in flight",
        "replica/snapshot.py",
        "            for bucket in engine.buckets:\n",
        "            engine.mark_stale()\n            for bucket in engine.buckets:\n",
    ),
    Breakage(
        "a promise is made again, for a later round",
        "membership/epochs.py",
        "            if epochs.promise is None:\n                seen",
        "            if True:\n                seen",
    ),
    Breakage(
        "an epoch does not wait for promises",
        "membership/epochs.py",
        "        if not missing:\n            return True\n",
        "        if missing is not None:\n            return True\n",
    ),
    Breakage(
        "the last text of an epoch counts",
        "membership/epoch_store.py",
        '            won = store.compare_set(own, "", epoch.text)\n            if',
        "            store.set(own, epoch.text)\n            won = epoch.text.encode()\n            if",
    ),
    Breakage(
        "an epoch begins with the round after the smallest promise",
        "membership/epoch_store.py",
        "start = max([since, *(promise.until + 1 for promise in promises.values())])",
        "start = max(since, min(promise.until + 1 for promise in promises.values()))",
    ),
    Breakage(
        "a worker mixes on after its promise",
        "membership/epochs.py",
        "self.neighbours.stop_mixing_after(None if self.promise is None else self.promise.until)",
        "self.neighbours.stop_mixing_after(None)",
    ),
    Breakage(
        "a worker that knows that it was left out mixes on",
        "membership/epochs.py",
        "                self.neighbours.stop_mixing_after(-1)\n",
        "                self.neighbours.stop_mixing_after(None)\n",
    ),
    Breakage(
        "a worker that was left out for a while mixes before its epoch begins",
        "membership/epochs.py",
        "self.mixing_from = epoch.start if has_missed else 0",
        "self.mixing_from = 0",
    ),
    Breakage(
        "a store that has lost epochs takes a new one from any worker",
        "membership/epoch_store.py",
        '            if not store.check([self._key("whole")]):\n                return None\n',
        "",
    ),
    Breakage(
        "a lost call of the store is not made again",
        "membership/epochs.py",
        "            self._told.in_store, self._keep_at = False, 0.0\n",
        "            self._told.in_store, self._keep_at = True, 0.0\n",
    ),
    Breakage(
        "nobody decides in place of a worker that has died",
        "membership/epochs.py",
        "return is_here + [rank",
        "return 100 + [rank",
    ),
    Breakage(
        "a checkpoint counts as complete without the file of another worker than the first",
        "checkpoint/saver.py",
        "        if kind:\n",
        "        if kind and rank == min(reports):\n",
    ),
    Breakage(
        "workers stop after the smallest vote",
        "checkpoint/preempt.py",
        "        return max(map(int, votes.result().values()))",
        "        return min(map(int, votes.result().values()))",
    ),
    Breakage(
        "a worker that leaves takes its vote with it",
        "transport/agreement.py",
        "agreement.forget_from(peer, has_left=peer in self._departed)",
        "agreement.forget_from(peer)",
    ),
    Breakage(
        "the result of an agreement counts whoever has decided",
        "transport/agreement.py",
        "if stands_by != agreement.stands_by and agreement.stands_by not in (-1, self._rank):",
        "if stands_by < -1:",
    ),
    Breakage(
        "what came over a connection that was lost still counts in an agreement",
        "transport/agreement.py",
        "        for rank in [rank for rank, via in self.via.items() if via == peer]:\n",
        "        for rank in [rank for rank, via in self.via.items() if via == -1]:\n",
    ),
    Breakage(
        "results of agreements are kept for ever",
        "transport/agreement.py",
        "        if len(results) > _KEPT:\n",
        "        if len(results) < 0:\n",
    ),
    Breakage(
        "without faults= collectives go on without a worker that is gone",
        "transport/collectives.py",
        "        if self._explain is not None and (absent",
        "        if self._explain is None and (absent",
    ),
    Breakage(
        "collectives of another time take each other's blocks",
        "transport/control_plane.py",
        "            self._number = self._base + number\n",
        "            self._number = number\n",
    ),
    Breakage(
        "an exchange that is dropped in doubt is not counted",
        "transport/settlement.py",
        "            self.one_sided += may_live\n",
        "",
    ),
    Breakage(
        "without faults= an exchange with a worker that is gone is left out",
        "transport/handles.py",
        "        raise self._explain(error, [peer], exchange_id) from error\n",
        "        return\n",
    ),
    Breakage(
        "an exchange is mixed without the other worker's vote",
        "transport/votes.py",
        "return Verdict.BOTH if pair.voted and self.peer_got.get(bucket) == round_ else None",
        "return Verdict.BOTH if pair.voted else None",
    ),
    Breakage(
        "messages of groups wait for a connection that was lost",
        "transport/connections.py",
        "        self.flow.fail_groups(link, link.why)\n",
        "",
    ),
    Breakage(
        "workers leave join() after the smallest vote",
        "replica/uneven.py",
        "    end = max(map(int,",
        "    end = min(map(int,",
    ),
    Breakage(
        "a mean of parts is not looked at again",
        "replica/mean.py",
        "            control.gather(None)  # who was lost in the mean of another part?\n",
        "",
    ),
    Breakage(
        "a part of a replica that is not finite counts for the others",
        "replica/mean.py",
        "counts = all(found.get(rank, False) for rank in mates)",
        "counts = is_finite",
    ),
    Breakage(
        "the workers of a replica go on in different rounds",
        "replica/mates.py",
        "target, self.nonfinite_in, known = map(max,",
        "target, self.nonfinite_in, known = map(min,",
    ),
    Breakage(
        "an epoch before the whole replica knows it",
        "membership/epochs.py",
        "if not self._new or self._new[0].number > self.limit:",
        "if not self._new:",
    ),
    Breakage(
        "an epoch names a part of a replica",
        "membership/epoch_store.py",
        "members = tuple(sorted(rank for number in replicas.whole(named) for rank in replicas.workers_of(number)))",
        "members = tuple(sorted(named))",
    ),
    Breakage(
        "an epoch of no whole replica",
        "membership/epoch_store.py",
        "        if not members:\n            return None\n",
        "        members = members or tuple(sorted(named))\n",
    ),
    Breakage(
        "a store that has lost epochs gets one from any worker",
        "membership/epoch_store.py",
        "if newest > epoch.number or 2 * len({*here, rank}.intersection(epoch.members)) <= len(epoch.members):",
        "if newest < 0:",
    ),
    Breakage(
        "an epoch for a part of a replica",
        "membership/epochs.py",
        "bool(self._epochs.replicas.whole(ready))",
        "bool(ready)",
    ),
    Breakage(
        "the end of a replica is torch's error",
        "replica/replica.py",
        "        self.mates.explain(fsdp_modules(model))\n",
        "",
    ),
    Breakage(
        "peers are asked for by the numbers of replicas",
        "transport/peers.py",
        "return self._transport.table.usable(self._in_all(edge), exchange_id)",
        "return self._transport.table.usable(edge, exchange_id)",
    ),
    Breakage(
        "a node's gradients are summed",
        "replica/node_gradients.py",
        "        self._values.div_(workers)",
        "        self._values.div_(1)",
    ),
    Breakage(
        "a gradient that one worker of a node lacks is lost",
        "replica/node_gradients.py",
        "                if param.grad is None and count:\n",
        "                if param.grad is None and count == len(self.params):\n",
    ),
    Breakage(
        "the workers of a node keep their shares",
        "replica/replica.py",
        "        if shares is not None and finished:\n",
        "        if shares is not None and len(finished) > 99:\n",
    ),
    Breakage(
        "a window that is open in a node is saved of its first worker alone",
        "replica/snapshot.py",
        'grads=snapshot["grads"] if replica._has_own_gradients() else {}',
        "grads={}",
    ),
    Breakage(
        "a worker of a node that has run out keeps its values",
        "_gossip.py",
        "        if uneven.some_are_out:\n",
        "        if uneven.some_are_out and not follows and uneven.source < 0:\n",
    ),
    Breakage(
        "the weights of a pair are the other way round",
        "topo/schedule.py",
        "return 2 * weights[other] /",
        "return 2 * weights[rank] /",
    ),
    Breakage(
        "a worker's own momentum takes what was mixed",
        "optim/tracking.py",
        "torch.sub(local(tracked), correction, out=local(own))",
        "local(own).copy_(local(tracked))",
    ),
    Breakage(
        "own momenta that were loaded count, whosever they are",
        "optim/tracking.py",
        "        if not trusted:\n",
        "        if not trusted and False:\n",
    ),
    Breakage(
        "own momenta stay as they are when the members change",
        "replica/momenta.py",
        "            tracking.forget()\n",
        "            pass\n",
    ),
    Breakage(
        "a worker without a batch has no gradient of zero",
        "replica/momenta.py",
        "            tracking.rest()\n",
        "            pass\n",
    ),
    Breakage(
        "the second moment is that of the momentum alone",
        "optim/gossip_adamw.py",
        "w = (self._share - left) / (1 - left) if left < self._share else 0.0",
        "w = 0.0",
    ),
]


def apply(breakage: Breakage, root: Path) -> None:
    """Puts the fault into the sources under ``root``."""
    path = root / "src" / "decent_dp" / breakage.file
    text = path.read_text(encoding="utf-8")
    assert text.count(breakage.old) == 1, f"{breakage.what}: {breakage.file} has changed; write the fault anew"
    path.write_text(text.replace(breakage.old, breakage.new), encoding="utf-8")


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=1800, check=False)


def copy_to(root: Path) -> None:
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)


def who_sees(breakage: Breakage, before: str | None) -> str | None:
    """The first fast test that fails on a copy of the sources with this fault; None if all pass. ``before``: the last time.

    A test counts if it fails again, alone: one that fails now and then has not seen the fault, and the tests run anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_to(root)
        apply(breakage, root)
        if before and run(root, *ALONE, before).returncode == 1:
            return before
        for _ in range(3):
            # These compare texts, or count lines, and would see each fault.
            ignored = [f"--ignore=tests/test_{name}.py" for name in ("breakages", "architecture")]
            out = run(root, *PYTEST, "-m", "not slow", "--maxfail=1", "-rfE", *ignored)
            found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", out.stdout, re.MULTILINE)
            assert (out.returncode == 0) == (found is None), out.stdout[-3000:] + out.stderr[-3000:]
            if found is None:
                return None
            if run(root, *ALONE, found[1]).returncode == 1:
                return found[1]
            print(f"{found[1]} failed once and then passed", flush=True)
        return None


def main() -> int:
    before = {row["what"]: row["seen_by"] for row in json.loads(RESULT.read_text(encoding="utf-8"))}
    rows = []
    for breakage in BREAKAGES:
        rows.append({**asdict(breakage), "seen_by": who_sees(breakage, before.get(breakage.what))})
        print(f"{breakage.what}: {rows[-1]['seen_by'] or 'NOT SEEN'}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        out = run(Path(folder), *ALONE, *sorted({row["seen_by"] for row in rows if row["seen_by"]}))
        if out.returncode:
            print(f"without a fault some of these fail, too: mend them first\n{out.stdout[-3000:]}")
            return 1
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["seen_by"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
