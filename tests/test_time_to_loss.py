"""The benchmark of the time to the same loss: what it computes from runs, and its emulated accelerator."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.characters import CharacterTransformer, loss_fn
from benchmarks.lab import shape
from benchmarks.loss_worker import Accelerator
from benchmarks.time_to_loss import DILATION, MAIN, planned, steps_to, timed_run


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
