"""The benchmark of fast links: its arithmetic."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import fast


def test_lines_are_medians_over_turns_of_means_over_workers() -> None:
    gloo = [[{"seconds": s, "busy": 0.04} for s in (0.1, 0.2, 0.3)], [{"seconds": s, "busy": 0.02} for s in (0.1, 0.4, 0.3)]]
    own = [
        [{"seconds": s, "busy": 0.06, "thread": 0.05} for s in (0.2, 0.2, 0.9)],
        [
            {"seconds": s, "busy": 0.12, "thread": 0.03, "held": 0.5, "longest": 7.0, "spin seconds": 2.0}
            for s in (0.2, 0.4, 0.3)
        ],
    ]
    for turn in own[0]:
        turn |= {"held": 0.1, "longest": 5.0, "spin seconds": 1.0}
    for turns in gloo:
        for turn in turns:
            turn["spin seconds"] = 0.5
    results = [{"gloo pair": gloo[rank], "pair float32": own[rank]} for rank in range(2)]
    base, line = fast.make_lines(results)
    assert base["ms"] == 300
    assert base["to_gloo"] == base["busy_to_gloo"] == 1
    assert "thread" not in base
    assert line["ms"] == pytest.approx(1e3 * statistics.median([0.2, 0.3, 0.6]))
    assert line["mb_per_s"] == pytest.approx(100 / 0.3, rel=1e-4)
    assert line["to_gloo"] == pytest.approx(statistics.median([0.1 / 0.2, 0.3 / 0.3, 0.3 / 0.6]))
    assert line["busy"] == pytest.approx(0.09 / 0.1)
    assert line["busy_to_gloo"] == pytest.approx(0.09 / 0.03)
    assert line["thread"] == pytest.approx(0.04 / 0.1)
    assert (line["held"], line["longest_ms"], line["spin_ms"]) == pytest.approx((0.3, 6.0, 1500))
    assert line["spin_to_gloo"] == pytest.approx(0.5 / 1.5, abs=1e-4)


def test_tables_show_what_was_measured() -> None:
    lines = [{"contender": "gloo pair", "ms": 80.4, "to_gloo": 1.0}, {"contender": "pair int8", "ms": 120.0, "mix": 0.333}]
    assert fast.make_table(lines) == (
        "| contender | ms | vs gloo pair | mix |\n| --- | ---: | ---: | ---: |\n"
        "| gloo pair | 80 | 1.00 |  |\n| pair int8 | 120 |  | 0.33 |\n"
    )
