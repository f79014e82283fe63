"""Schedules against values worked out by hand."""

import math

import pytest

import lmzoo
from lmzoo import optim, parts
from lmzoo.tokenizer import byte
from models import make

SCHEDULES = [optim.constant, optim.linear, optim.cosine, optim.inverse_sqrt, optim.wsd]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_by_equal_parts_to_the_peak(schedule):
    assert [schedule(step, 100, warmup_steps=4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(0, 40, warmup_fraction=0.1) == 0.25  # 4 of 40 steps
    assert schedule(0, 40, warmup_steps=2, warmup_fraction=0.1) == 0.5  # steps, where given, win
    assert schedule(0, 100, warmup_steps=0) == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 14, 15, 26, 1000])
def test_a_fraction_is_a_step_or_more_and_ends_at_the_peak(schedule, total):
    warmup = max(1, round(0.1 * total))
    values = [schedule(step, total, warmup_fraction=0.1) for step in range(total)]
    assert values[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert max(values) == values[warmup - 1] == 1.0


def test_constant_stays():
    assert {optim.constant(step, 100, warmup_steps=10) for step in range(9, 200)} == {1.0}


def test_linear_falls_by_equal_parts_to_its_end():
    values = [optim.linear(step, 14, warmup_steps=10) for step in (10, 11, 12, 13, 14, 99)]
    assert values == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    assert optim.linear(12, 14, warmup_steps=10, end=0.2) == pytest.approx(0.6)


def test_cosine_passes_its_known_points():
    def at(part):
        return optim.cosine(10 + round(part * 60), 70, warmup_steps=10, end=0.1)

    # 0.1 + 0.9 * (1 + cos(pi * part)) / 2, with cos of 0, 60, 90, 120, 180 degrees
    assert [at(p) for p in (0, 1 / 3, 1 / 2, 2 / 3, 1)] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert optim.cosine(500, 70, warmup_steps=10, end=0.1) == pytest.approx(0.1)  # never up again
    assert optim.cosine(70, 70) == pytest.approx(0.0)


def test_inverse_sqrt_is_the_formula_of_vaswani_et_al():
    d_model, warmup = 512, 4000
    peak = (d_model * warmup) ** -0.5
    for n in (1, 100, 3999, 4000, 4001, 16000, 100000):
        paper = d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert peak * optim.inverse_sqrt(n - 1, 100000, warmup_steps=warmup) == pytest.approx(paper, rel=1e-12)
    assert optim.inverse_sqrt(15999, 100000, warmup_steps=4000) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total, warmup", [(1, 0), (1, 1), (3, 3), (3, 10), (10, 0)])
def test_short_runs_have_finite_multipliers_between_0_and_1(schedule, total, warmup):
    values = [schedule(step, total, warmup_steps=warmup) for step in range(total)]
    assert all(math.isfinite(v) and 0 < v <= 1 for v in values)


def test_wsd_stays_and_then_falls():
    """Ten steps of warm-up, sixteen at the peak, four of fall: 1 - p, and 1 - sqrt(p), for p = 0, 1/4, 1/2, 3/4, 1."""
    def at(steps, **words):
        return [optim.wsd(step, 30, warmup_steps=10, decay_steps=4, **words) for step in steps]

    for decay in ("linear", "1-sqrt"):
        assert at((0, 4, 9, 10, 20, 26), decay=decay) == pytest.approx([0.1, 0.5, 1, 1, 1, 1])
    assert at(range(26, 31), decay="linear") == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert at(range(26, 31)) == pytest.approx([1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0])
    assert at((27, 99), decay="1-sqrt", end=0.2) == pytest.approx([0.2 + 0.8 * 0.5, 0.2])


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (1, [1.0]),
        (2, [1.0, 1.0]),
        (5, [1.0, 1.0, 1.0, 1.0, 1.0]),  # a fall of one step begins with it, and is over when the run is
        (10, [1.0] * 9 + [0.5]),
        (20, [0.5] + [1.0] * 16 + [0.75, 0.5, 0.25]),
    ],
)
def test_wsd_by_fractions(total, expected):
    """Warm-up over a tenth, the fall over a fifth of the run, each of one step or more."""
    values = [optim.wsd(s, total, warmup_fraction=0.1, decay_fraction=0.2, decay="linear") for s in range(total)]
    assert values == pytest.approx(expected)


def test_wsd_where_its_parts_overlap_or_are_missing():
    """The lower of both counts; without a fall it is `constant`."""
    values = [optim.wsd(step, 4, warmup_steps=4, decay_steps=4, decay="linear") for step in range(4)]
    assert values == pytest.approx([0.25, 0.5, 0.5, 0.25])
    values = [optim.wsd(step, 4, decay_steps=9, decay="linear") for step in range(4)]
    assert values == pytest.approx([1, 0.75, 0.5, 0.25])
    assert {optim.wsd(step, 4, decay_steps=0) for step in range(4)} == {1.0}


def test_wsd_runs_of_two_lengths_are_one_until_the_fall():
    """So that a longer run can go on from a checkpoint before it."""
    short, long = ([optim.wsd(step, n, warmup_steps=3, decay_steps=5) for step in range(15)] for n in (20, 200))
    assert short == long


def test_a_run_calls_the_schedule_itself():
    """Hydra's partial would check every call anew, which took a quarter of what a step costs beside its arithmetic."""
    config = lmzoo.compose("model=gpt", "task=clm", "schedule=linear", "schedule.warmup_steps=10", "schedule.end=0.5")
    schedule = parts.build_task(config, make("gpt", vocab_size=400), byte([], 400, sentinels=3)).schedule
    assert schedule.func is optim.linear
    assert [schedule(step, 110) for step in (4, 60, 110)] == pytest.approx([0.5, 0.75, 0.5])
