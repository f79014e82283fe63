"""Optimizers as their recipes say, held against torch used plainly."""

import copy
import functools

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import lmzoo
from lmzoo import UserError, optim
from lmzoo.checks import groups
from models import ids, make, read
from small_steps import VOCABULARY, emptied, fit, micro_batches, task, weights

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "betas": [0.9, 0.95], "eps": 1e-8}


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


# --- the recipes of conf/optim

NAMES = groups()["optim"]


def recipe(name: str) -> dict:
    """The words of conf/optim/NAME.yaml."""
    return {"lr": 1e-3} | read("optim/_shared") | {k: v for k, v in read(f"optim/{name}").items() if k != "defaults"}


PLAINLY = {
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01, (0.9, 0.95), 1e-8, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, 0.01, 0.9, nesterov=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, 0.01, eps=(1e-15, 1e-3)),
}


@pytest.mark.parametrize("name", PLAINLY)
def test_a_recipe_is_torch_used_plainly(name):
    """Three steps; matrices decay, vectors don't."""
    nets = make("gpt"), make("gpt")
    config = recipe(name) | {"lr": 0.01, "weight_decay": 0.2}
    every = list(nets[1].parameters())
    decay, rest = [w for w in every if w.ndim >= 2], [w for w in every if w.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizers = optim.build(nets[0], config), PLAINLY[name](groups)
    for seed in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(ids(2, 8, seed=seed)).square().mean().backward()
            optimizer.step()
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(one, other)


def test_adafactor_takes_t5_s_relative_steps():
    """Step t is min(lr, 1/sqrt(t)) x RMS(W) x an update of root mean square 1 (Shazeer and Stern 2018, section 8).

    With equal gradients the factored second moment is exact, so that the update has the size 1 everywhere.
    """
    net = nn.Sequential(nn.Linear(4, 6, bias=False))
    optimizer = optim.build(net, recipe("adafactor") | {"lr": 0.6})
    for t, rate in ((1, 0.6), (2, 0.6), (3, 3**-0.5), (4, 0.5)):
        before = net[0].weight.detach().clone()
        net[0].weight.grad = torch.full((6, 4), 1e-4)
        optimizer.step()
        size = rate * before.square().mean().sqrt()
        torch.testing.assert_close(before - net[0].weight.detach(), size.expand(6, 4), rtol=1e-4, atol=1e-7, msg=str(t))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_plain_and_its_groups_are_named(name, tmp_path):
    net = make("gpt")
    optimizer = optim.build(net, recipe(name))
    net(ids(2, 8)).square().mean().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert [group["name"] for group in state["param_groups"]][-2:] == ["decay", "no_decay"]
    assert all(group["lr_factor"] == 1.0 for group in state["param_groups"])


def test_a_recipe_s_rate_is_that_of_adamw_and_muon():
    """What conf/recipe says of the learning rate was found with AdamW."""
    rates = {name: lmzoo.compose("model=gpt", "task=clm", f"optim={name}").optim.lr for name in NAMES}
    assert rates == {"adamw": 3e-3, "muon": 3e-3, "adafactor": 5e-2, "sgd": 0.1}
    assert lmzoo.compose("model=gpt", "task=clm", "size=base").optim.lr == 1e-3
    assert lmzoo.compose("model=gpt", "task=clm", "optim=sgd", "optim.lr=1").optim.lr == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_targets_changes_nothing(name):
    """Neither weights nor moments nor the step's number that Adafactor and AdamW keep."""
    windows = [micro_batches(2, seed) for seed in range(2)]
    empty = [emptied(micro) for micro in windows[0]]
    trained = []
    for steps in (windows, [empty, windows[0], empty, windows[1]]):
        trained.append(task(make("gpt", vocab_size=VOCABULARY), recipe(name) | {"lr": 0.01, "weight_decay": 0.1}))
        outputs = fit(trained[-1], steps)
    assert [output["skipped"] for output in outputs] == [1, 1, 2, 2]
    for before, after in zip(*(weights(one).values() for one in trained), strict=True):
        assert torch.equal(before, after)
    states = [one.trainer.optimizers[0].state_dict()["state"] for one in trained]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][word]) for word, value in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_gradients_changes_nothing(name):
    """What the step of a loss that is not finite is made to be."""
    net = make("gpt")
    optimizer = optim.build(net, recipe(name))
    net(ids(2, 8)).square().mean().backward()
    optimizer.step()
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in net.named_parameters())
    for number, words in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[number][word]) for word, value in words.items())
