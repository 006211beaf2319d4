"""The benchmark of the time to the same loss: what it computes from runs, and its emulated accelerator."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import loss_worker
from benchmarks.characters import CharacterTransformer, loss_fn
from benchmarks.lab import shape
from benchmarks.loss_worker import LENGTH, SAMPLES, Accelerator, Run, measure
from benchmarks.time_to_loss import (
    CONTENDERS,
    DILATION,
    MAIN,
    Kept,
    _codes,
    compose,
    key_of,
    planned,
    steps_between,
    steps_to,
    table,
    timed_run,
)


def test_steps_are_interpolated_in_their_logarithm():
    assert steps_to({500: 1.4, 1000: 1.2, 2000: 1.0}, 1.3) == pytest.approx((500 * 1000) ** 0.5)
    assert steps_to({500: 1.4, 1000: 1.2}, 1.2) == pytest.approx(1000)
    assert steps_to({500: 1.1, 1000: 1.2}, 1.3) == 500  # no run was shorter
    assert steps_to({500: 1.4}, 1.3) is None


def test_an_accelerator_hides_the_work_of_the_processor():
    model = CharacterTransformer(10, 4, width=16, depth=2)
    Accelerator(model, 0.3)
    x = torch.zeros(1, 4, dtype=torch.int64)
    busy = time.process_time()
    start = time.perf_counter()
    loss = loss_fn(model, x, x)
    between = time.perf_counter()
    loss.backward()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert between - start >= 0.099
    assert seconds >= 0.299
    assert busy < 0.25


@pytest.mark.slow
def test_times_are_of_whole_periods_on_a_clock_that_fits():
    quick, slow = timed_run(MAIN, "ddp", None), timed_run(MAIN, "ddp", 1)
    assert (quick.dilation, slow.dilation) == (DILATION, 1)
    assert timed_run(MAIN, "diloco/8", None).steps % 8 == 0
    for rate in (1, 60):
        run = timed_run(MAIN, planned(MAIN, rate), rate)
        assert run.steps % (3 * int(run.contender.rpartition("/")[2])) == 0
        assert run.dilation == DILATION


def test_a_slow_link_passes_no_more_at_once_than_a_fast_one_in_the_same_time():
    bursts = {rate: int(words[words.index("burst") + 1].removesuffix("b")) for rate in (1, 20, 1000) for words in [shape(rate)]}
    assert bursts == {1: 16 * 1024, 20: 87_500, 1000: 256 * 1024}


def test_every_exchange_of_a_contender_is_timed():
    every = {
        "sparseloco/15": 15,
        "muloco/30/4": 30,
        "streaming/20": 20,
        "diloco/8": 8,
        "ours/base-2/1bit/32": 32,
        "ddp/fp16": 1,
    }
    assert {name: steps_between(name) for name in every} == every
    for name, h in every.items():
        assert timed_run(MAIN, name, 1).steps % h == 0
    assert timed_run(MAIN, "sparseloco/15", 1).dilation == DILATION  # its steps do not wait for seconds


def test_computation_and_bytes_are_those_of_all_workers_and_steps():
    row = {"final": {"500": 1.3}, "steps": 500.0, "reaches": True, "workers": 8, "bytes": 80.0}
    alone = row | {"steps": 2500.0, "workers": 1, "bytes": 0.0}
    found = {"planned": "ddp", "to_ddp": {"ddp": 1.0, "alone": 0.5}, "ms": {}}
    lines = table(
        {"setups": [{"rates": {"5": found}}], "contenders": {"ddp": row, "alone": alone, "diloco/8": row | {"bytes": 4.0}}}
    )
    cells = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines.splitlines()[2:5]]
    assert cells == [["1.00", "1.00", "1.00"], ["5.00", "0.62", "0.000"], ["1.00", "1.00", "0.050"]]


def test_a_run_ends_with_the_first_worker_that_fails():
    workers = [
        subprocess.Popen([sys.executable, "-c", code]) for code in ("import time; time.sleep(60)", "raise SystemExit(3)")
    ]
    began = time.monotonic()
    try:
        assert _codes(workers) == [None, 3]
        assert time.monotonic() - began < 30
    finally:
        workers[0].kill()
        workers[0].wait()


def test_bytes_are_those_of_the_lab_s_link(tmp_path: Path):
    dev = tmp_path / "dev"
    dev.write_text(
        "Inter-| Receive\n face |bytes\n    lo: 1 2 0 0 0 0 0 0 3 4 0\n  lab0: 500 2 0 0 0 0 0 0 700 4 0 0 0 0 0 0\n"
    )
    assert loss_worker.bytes_sent(dev) == 700


def timed(rank: int, n: int) -> dict[str, float]:
    return measure(Run("alone", 3, emulated_ms=20.0, timed=True, width=16, dilation=4))


def test_times_are_those_of_the_slow_clock(workers):
    (found,) = workers(1, timed)
    assert 20 <= found["ms"] < 40


def counted(rank: int, n: int) -> dict[str, float]:
    counts = iter((100, 400))
    loss_worker.bytes_sent = lambda: next(counts)
    return measure(Run("alone", 3, emulated_ms=1.0, timed=True, width=16))


def test_bytes_are_counted_in_the_steps_that_are_timed(workers):
    (found,) = workers(1, counted)
    assert found["bytes"] == 100


def shapes(rank: int, n: int, emulated_ms: float | None) -> set[tuple[int, ...]]:
    seen = set()

    def noting(model: Any, x: Any, y: Any) -> Any:
        seen.add(tuple(x.shape))
        return model(x).square().mean()

    loss_worker.loss_fn = noting
    measure(Run("alone", 2, emulated_ms=emulated_ms, timed=True, width=16))
    return seen


def test_real_steps_are_timed_with_the_batches_of_training(workers):
    assert workers(1, shapes, None) == [{(SAMPLES, LENGTH)}]
    assert workers(1, shapes, 1.0) == [{(1, 4)}]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Losses that fall by 0.1 with each 100 steps beyond 500, and a step of DDP that is 10 times as long as the others."""
    found = Kept(tmp_path / "kept.jsonl")
    for contender, (numbers, rates) in CONTENDERS.items():
        for steps in numbers:
            for lr in rates:
                loss = 1.5 - (steps - 500) / 1000 + lr - min(rates) + (contender == "diloco/8")
                found.add(key_of(Run(contender, steps, lr)), {"curve": [[steps, loss]]})
        found.add(key_of(timed_run(MAIN, contender, 5), 5), {"ms": 1000.0 if contender == "ddp" else 100.0})
    return Kept(tmp_path / "kept.jsonl")


@pytest.mark.slow
def test_results_are_made_of_the_best_runs_and_their_times(kept: Kept):
    made: dict[str, Any] = compose(kept)
    assert made["target"] == pytest.approx(1.01 * 1.5)
    rows, ratios = made["contenders"], made["setups"][0]["rates"]["5"]["to_ddp"]
    assert rows["ddp"]["lr"] == {500: 2e-3}
    assert (rows["ddp"]["steps"], rows["ddp"]["reaches"], ratios["ddp"]) == (500, True, 1.0)
    assert (rows["diloco/8"]["steps"], rows["diloco/8"]["reaches"]) == (850, False)
    assert ratios["diloco/8"] == pytest.approx(850 * 0.1 / 500)
    # Steps with whole gradients at the beginning take DDP's time.
    assert ratios["powersgd/4"] == pytest.approx((498 * 0.1 + 2) / 500)
    assert ratios["post-local/8"] == pytest.approx((0.9 * 650 * 0.1 + 0.1 * 650) / 500)
    assert set(made["setups"][0]["rates"]["60"]["to_ddp"]) == set()
