"""The learning rate as a plain function of the step.

A schedule is `f(step, total_steps, ...) -> multiplier of the base learning rate`, where `step` counts the optimizer
steps already taken (0 for the first). Having no state, it needs no place in a checkpoint.
"""

import math
from typing import Literal


def constant(step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0) -> float:
    """Linear warm-up, then 1."""
    return min(1.0, _ramp(step, _span(total_steps, warmup_steps, warmup_fraction)))


def linear(
    step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0, end: float = 0.0
) -> float:
    """Linear warm-up, then a straight line that reaches `end` once `total_steps` are taken (Devlin et al. 2018)."""
    warmup = _span(total_steps, warmup_steps, warmup_fraction)
    if step < warmup:
        return _ramp(step, warmup)
    return end + (1 - end) * (1 - _progress(step, warmup, total_steps))


def cosine(
    step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0, end: float = 0.0
) -> float:
    """Linear warm-up, then half a cosine from 1 to `end` (Loshchilov and Hutter 2016, arXiv:1608.03983, one cycle)."""
    warmup = _span(total_steps, warmup_steps, warmup_fraction)
    if step < warmup:
        return _ramp(step, warmup)
    return end + (1 - end) * (1 + math.cos(math.pi * _progress(step, warmup, total_steps))) / 2


def inverse_sqrt(step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0) -> float:
    """min(n / w, sqrt(w / n)) for the n-th step and w warm-up steps (Vaswani et al. 2017, arXiv:1706.03762, eq. 3).

    The paper's rate is d_model^-0.5 * min(n^-0.5, n * w^-1.5): this, times the peak (d_model * w)^-0.5.
    """
    warmup = max(1, _span(total_steps, warmup_steps, warmup_fraction))
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def wsd(
    step: int,
    total_steps: int,
    warmup_steps: int | None = None,
    warmup_fraction: float = 0.0,
    decay_steps: int | None = None,
    decay_fraction: float = 0.2,
    decay: Literal["linear", "1-sqrt"] = "1-sqrt",
    end: float = 0.0,
) -> float:
    """Warm-up, 1, and a fall to `end` over the last steps (Hu et al. 2024, arXiv:2404.06395).

    With p the part of the fall that is done it is 1 - p or 1 - sqrt(p) (Hägele et al. 2024, arXiv:2405.18392). Where
    warm-up and fall overlap, the lower one counts.
    """
    warmup = _span(total_steps, warmup_steps, warmup_fraction)
    fall = min(total_steps, _span(total_steps, decay_steps, decay_fraction))
    done = _progress(max(step, total_steps - fall), total_steps - fall, total_steps)
    left = 1 - (done if decay == "linear" else math.sqrt(done))
    return min(1.0, _ramp(step, warmup), end + (1 - end) * left)


def _span(total_steps: int, steps: int | None, fraction: float) -> int:
    """A part of the run in steps: `steps` where it is given, else `fraction` of the run, a step or more."""
    if steps is not None:
        return steps
    return max(1, round(fraction * total_steps)) if fraction else 0


def _ramp(step: int, warmup: int) -> float:
    return (step + 1) / max(1, warmup)


def _progress(step: int, warmup: int, total_steps: int) -> float:
    return min(1.0, (step - warmup) / max(1, total_steps - warmup))
