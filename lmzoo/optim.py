"""Which parameters decay, the optimizer, and the learning rate as a plain function of the step.

Weight decay is for the matrices that multiply activations. Norm gains and biases (fewer than two dimensions) are not
decayed; embeddings are, as in BERT (Devlin et al. 2018, arXiv:1810.04805) and GPT-2/3, whose recipes spare only norms
and biases. AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101.

A schedule is `f(step, total_steps, ...) -> multiplier of the base learning rate`, where `step` counts the optimizer
steps already taken (0 for the first). Having no state, it needs no place in a checkpoint.
"""

import math
from collections.abc import Mapping
from inspect import signature

import torch
from hydra.utils import instantiate

from .errors import UserError

FUSED_DEVICES = ("cpu", "cuda")


def build(net: torch.nn.Module, config: Mapping) -> torch.optim.Optimizer:
    """The optimizer that `config` (lr, weight_decay, optimizer: a recipe or its node) names, over `net`'s decay groups.

    One fused kernel does the step where the optimizer has one and every weight is on a device it serves; a recipe
    that sets `fused` itself is obeyed.
    """
    recipe = config["optimizer"]
    if isinstance(recipe, Mapping):
        recipe = instantiate(recipe, _convert_="all")
    groups = decay_groups(net, config["weight_decay"])
    devices = {p.device.type for group in groups for p in group["params"]}
    options = {"lr": config["lr"]}
    settings = signature(recipe).parameters
    if "fused" in settings and settings["fused"].default is None and devices.issubset(FUSED_DEVICES):
        options["fused"] = True
    return recipe(groups, **options)


def decay_groups(net: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups `decay` (two dimensions or more) and `no_decay`; each trainable weight once, tied ones too."""
    weights = [p for p in net.parameters() if p.requires_grad]  # parameters() already yields a shared tensor once
    if not weights:
        raise UserError("the model has no trainable parameter: unfreeze at least one")
    groups = [
        {"name": "decay", "params": [p for p in weights if p.ndim >= 2], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def constant(step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0) -> float:
    """Linear warm-up, then 1."""
    return min(1.0, _ramp(step, _warmup(total_steps, warmup_steps, warmup_fraction)))


def linear(
    step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0, end: float = 0.0
) -> float:
    """Linear warm-up, then a straight line that reaches `end` once `total_steps` are taken (Devlin et al. 2018)."""
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction)
    if step < warmup:
        return _ramp(step, warmup)
    return end + (1 - end) * (1 - _progress(step, warmup, total_steps))


def cosine(
    step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0, end: float = 0.0
) -> float:
    """Linear warm-up, then half a cosine from 1 to `end` (Loshchilov and Hutter 2016, arXiv:1608.03983, one cycle)."""
    warmup = _warmup(total_steps, warmup_steps, warmup_fraction)
    if step < warmup:
        return _ramp(step, warmup)
    return end + (1 - end) * (1 + math.cos(math.pi * _progress(step, warmup, total_steps))) / 2


def inverse_sqrt(step: int, total_steps: int, warmup_steps: int | None = None, warmup_fraction: float = 0.0) -> float:
    """min(n / w, sqrt(w / n)) for the n-th step and w warm-up steps (Vaswani et al. 2017, arXiv:1706.03762, eq. 3).

    The paper's rate is d_model^-0.5 * min(n^-0.5, n * w^-1.5): this, times the peak (d_model * w)^-0.5.
    """
    warmup = max(1, _warmup(total_steps, warmup_steps, warmup_fraction))
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def _warmup(total_steps: int, steps: int | None, fraction: float) -> int:
    """Warm-up in steps: `warmup_steps` where it is given, else `warmup_fraction` of the run."""
    return round(fraction * total_steps) if steps is None else steps


def _ramp(step: int, warmup: int) -> float:
    return (step + 1) / max(1, warmup)


def _progress(step: int, warmup: int, total_steps: int) -> float:
    return min(1.0, (step - warmup) / max(1, total_steps - warmup))
