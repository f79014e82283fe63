"""What is trained, by which optimizer, and how fast: parameter groups, Muon beside AdamW, schedules.

An optimizer is a recipe that is called with the groups and the learning rate; any class of `torch.optim` is one. AdamW:
Loshchilov and Hutter 2017, arXiv:1711.05101; Adafactor: Shazeer and Stern 2018, arXiv:1804.04235.
"""

from collections.abc import Mapping
from inspect import signature

import torch
from hydra.utils import instantiate

from .groups import choose, freeze, hidden_matrices, parameter_groups, table
from .muon import MuonAdamW
from .schedules import constant, cosine, inverse_sqrt, linear, wsd
from .slices import Adafactor

__all__ = [
    "Adafactor", "MuonAdamW", "build", "choose", "constant", "cosine", "freeze", "hidden_matrices", "inverse_sqrt",
    "linear", "parameter_groups", "table", "wsd",
]  # fmt: skip

FUSED_DEVICES = ("cpu", "cuda")


def build(net: torch.nn.Module, config: Mapping) -> torch.optim.Optimizer:
    """The optimizer of the recipe (or its node) `config["optimizer"]`, over the groups of `net`'s trainable parameters.

    The other words of `config` are those of `parameter_groups`. One fused kernel does the step where the optimizer has
    one and every weight is on a device it serves; a recipe that sets `fused` itself is obeyed. One that takes `hidden`
    is told the matrices of the blocks.
    """
    recipe = config["optimizer"]
    if isinstance(recipe, Mapping):
        recipe = instantiate(recipe, _convert_="all")
    groups = parameter_groups(net, config)
    devices = {p.device.type for group in groups for p in group["params"]}
    options = {"lr": config["lr"]}
    settings = signature(recipe).parameters
    if "fused" in settings and settings["fused"].default is None and devices.issubset(FUSED_DEVICES):
        options["fused"] = True
    if "hidden" in settings:
        options["hidden"] = hidden_matrices(net)
    return recipe(groups, **options)
