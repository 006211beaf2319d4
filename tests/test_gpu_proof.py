"""`make gpu-proof`, on the CPU: every way trains, and so do the real workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import proof


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_ways_train_on_the_cpu(tmp_path: Path):
    out = tmp_path / "proof.json"
    found = proof.main(["--seconds", "20", "--width", "16", "--depth", "1", "--device", "cpu", "--out", str(out)])
    assert json.loads(out.read_text()) == found
    assert set(found["ways"]) == set(proof.WAYS)
    for name, way in found["ways"].items():
        assert way["curve"][-1][1] < way["curve"][0][1], name
        assert way["bytes_per_step"] > 0
    sent = {name: way["bytes_per_step"] for name, way in found["ways"].items()}
    assert sent["gossip(), '2bit'"] < sent["gossip()"] / 5
    assert found["real"]["loss"] < 5.6
    assert found["real"]["rejected"] == 0


def test_windows_are_the_same_for_the_same_seed():
    data, device = proof.text(), proof.torch.device("cpu")
    first, second = (proof.windows(data, (3, 1), 4, device)[0] for _ in range(2))
    assert proof.torch.equal(first, second)
    assert not proof.torch.equal(first, proof.windows(data, (3, 2), 4, device)[0])
    assert len(data) > 1_000_000
