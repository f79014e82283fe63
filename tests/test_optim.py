"""Decay groups and schedules against values worked out by hand."""

import functools
import math

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lmzoo import UserError, optim

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "betas": [0.9, 0.95], "eps": 1e-8}
SCHEDULES = [optim.constant, optim.linear, optim.cosine, optim.inverse_sqrt]


class Net(nn.Module):
    """A matrix of each kind, a bias, a norm, and a head that shares the embedding's matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def build(net: nn.Module, **changes) -> torch.optim.Optimizer:
    return optim.build(net, OmegaConf.create({"lr": 0.1, "weight_decay": 0.5, "optimizer": ADAMW} | changes))


def test_each_weight_is_in_one_group_and_only_matrices_decay():
    net = Net()
    groups = {g["name"]: g for g in build(net).param_groups}
    assert {id(p) for p in groups["decay"]["params"]} == {id(net.embed.weight), id(net.up.weight)}
    assert {id(p) for p in groups["no_decay"]["params"]} == {id(net.up.bias), id(net.norm.weight), id(net.norm.bias)}
    assert [len(g["params"]) for g in groups.values()] == [2, 3]
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.5, 0.0)


def test_a_step_without_gradient_shrinks_matrices_by_lr_times_decay_and_nothing_else():
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = build(net)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.5 if p.ndim == 2 else 1))


def test_frozen_weights_are_left_out_and_an_empty_group_too():
    net = Net()
    for p in (net.up.bias, net.norm.weight, net.norm.bias, net.up.weight):
        p.requires_grad_(False)
    assert [[p.shape for p in g["params"]] for g in build(net).param_groups] == [[(7, 4)]]
    net.embed.weight.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        build(net)


def test_the_recipe_decides_the_optimizer_and_fused_is_used_where_torch_has_it():
    optimizer = build(Net())
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["betas"], optimizer.defaults["fused"], optimizer.defaults["lr"]) == (
        (0.9, 0.95),
        True,
        0.1,
    )
    assert build(Net(), optimizer=ADAMW | {"fused": False}).defaults["fused"] is False
    partial = functools.partial(torch.optim.Adamax, eps=1e-4)  # it has no fused kernel
    ready = optim.build(Net(), {"lr": 0.1, "weight_decay": 0.0, "optimizer": partial})
    assert (type(ready), ready.defaults["eps"]) == (torch.optim.Adamax, 1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_by_equal_parts_to_the_peak(schedule):
    assert [schedule(step, 100, warmup_steps=4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(0, 40, warmup_fraction=0.1) == 0.25  # 4 of 40 steps
    assert schedule(0, 40, warmup_steps=2, warmup_fraction=0.1) == 0.5  # steps, where given, win
    assert schedule(0, 100, warmup_steps=0) == 1.0


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
