"""Muon and AdamW as one optimizer: each half is torch's own, and the whole has one state.

Run as a script this file is one of two ranks.
"""

import warnings

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

import ranks
from lmzoo import UserError, optim
from models import ids, make
from small_steps import VOCABULARY, fit, micro_batches, newton_schulz_in_fp32, share, task, weights

WORDS = {"lr": 0.02, "weight_decay": 0.1}


def build(net, recipe=None, **words):
    node = {"_target_": "lmzoo.optim.MuonAdamW", "_partial_": True} | (recipe or {})
    optimizer = optim.build(net, WORDS | words | {"optimizer": node})
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def step(net, optimizer, seed, shrink=1.0):
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * shrink
    optimizer.zero_grad()
    net(ids(2, 8, seed=seed)).square().mean().backward()
    optimizer.step()


def parameters(net):
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def orthogonalised(matrix, steps=5):
    """Newton-Schulz by hand, in double precision: X <- aX + b(XX')X + c(XX')^2 X with Jordan's a, b, c."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double() / matrix.double().norm()
    for _ in range(steps):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_one_step_is_newton_schulz_by_hand(shape):
    """From rest, Nesterov's momentum of gradient G is (1 - m^2) G, whose scale does not matter.

    torch iterates in bfloat16, which is good for about 1 %.
    """
    net = torch.nn.Module()
    net.blocks = torch.nn.ModuleList([torch.nn.Linear(*shape[::-1])])
    torch.manual_seed(0)
    before, gradient = net.blocks[0].weight.detach().clone(), torch.randn(shape)
    net.blocks[0].weight.grad = gradient
    build(net).step()
    update = orthogonalised(gradient) * 0.2 * max(shape) ** 0.5
    expected = before.double() * (1 - 0.02 * 0.1) - 0.02 * update
    moved, wanted = net.blocks[0].weight.double() - before, expected - before
    assert (moved - wanted).norm() < 0.03 * wanted.norm()
    assert torch.linalg.svdvals(orthogonalised(gradient)).sub(1).abs().max() < 0.5  # what the iteration is for


def test_an_update_is_as_large_as_adamw_s():
    """Liu et al. 2025: with a full-rank gradient the root mean square of lr 1 is about 0.2, whatever the shape."""
    for rows, columns in ((64, 64), (64, 256), (256, 64)):
        net = torch.nn.Module()
        net.blocks = torch.nn.ModuleList([torch.nn.Linear(columns, rows)])
        before = net.blocks[0].weight.detach().clone()
        net.blocks[0].weight.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        build(net, lr=1.0, weight_decay=0.0).step()
        assert (net.blocks[0].weight - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_halves_are_torch_s_own(name):
    """Three steps against torch.optim.Muon and torch.optim.AdamW side by side."""
    one, other = make(name), make(name)
    whole = build(one, {"lr_ratio": 3.0, "adjust_lr_fn": "original", "momentum": 0.9, "betas": [0.8, 0.9]})
    hidden = optim.hidden_matrices(other)
    rest = [weight for weight in other.parameters() if weight not in hidden]
    vectors = {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0}
    decays = [{"params": [w for w in rest if w.ndim >= 2]}, vectors]
    muon = torch.optim.Muon([w for w in other.parameters() if w in hidden], 0.06, 0.1, 0.9, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(decays, 0.02, (0.8, 0.9), weight_decay=0.1, fused=True)
    for seed in range(3):
        step(one, whole, seed)
        muon.zero_grad(), adamw.zero_grad()
        other(ids(2, 8, seed=seed)).square().mean().backward()
        muon.step(), adamw.step()
    assert_equal(parameters(one), parameters(other))


def test_embedding_head_and_vectors_are_adamw_s():
    """BEHAVIOUR 26, and the state shows it: Muon has a momentum, AdamW two moments."""
    net = make("gpt", head="untied", position="learned")
    optimizer = build(net)
    step(net, optimizer, 0)
    hidden = optim.hidden_matrices(net)
    for weight in net.parameters():
        words = {"momentum_buffer"} if weight in hidden else {"step", "exp_avg", "exp_avg_sq"}
        assert {*optimizer.state[weight]} == words
    assert [g["name"] for g in optimizer.param_groups] == ["muon_decay", "decay", "no_decay"]


def test_a_saved_state_goes_on_bit_for_bit(tmp_path):
    """One state of plain types, learning rates scheduled for all groups, into a fresh net and optimizer."""
    net = make("gpt")
    optimizer = build(net, {"lr_ratio": 2.0}, layer_decay=0.8)
    for seed in range(2):
        step(net, optimizer, seed, shrink=0.5)
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    again = make("gpt", seed=7)
    restored = build(again, {"lr_ratio": 2.0}, layer_decay=0.8)
    again.load_state_dict(saved["net"])
    restored.load_state_dict(saved["optimizer"])
    for seed in range(2, 5):
        step(net, optimizer, seed, shrink=0.25)
        step(again, restored, seed, shrink=0.25)
    assert_equal(parameters(again), parameters(net))
    rates = {group["name"]: group["initial_lr"] for group in restored.param_groups}
    assert rates["muon_decay_1"] == pytest.approx(2 * 0.8 * 0.02) and rates["decay_3"] == pytest.approx(0.8**3 * 0.02)


def test_the_learning_rate_of_each_group_counts():
    """At rate 0 nothing moves."""
    net = make("gpt")
    optimizer, before = build(net), parameters(net)
    step(net, optimizer, 0, shrink=0.0)
    assert_equal(parameters(net), before)


def test_layers_can_be_frozen_but_not_all():
    net = make("gpt")
    optim.freeze(net, ["*", "-blocks.1.attn.q.weight"])
    assert [g["name"] for g in build(net).param_groups] == ["muon_decay"]
    step(net, build(net), 0)
    net = make("gpt")
    optim.freeze(net, ["blocks*"])
    with pytest.raises(UserError, match="optim=muon: no matrix of the blocks is trained; take optim=adamw"):
        build(net)


def trained(rank=0, world=1):
    """The weights after three steps of a net with a frozen layer and a rate for each of the others."""
    config = WORDS | {"layer_decay": 0.8, "freeze": ["blocks.0.*"], "optimizer": {
        "_target_": "lmzoo.optim.MuonAdamW", "_partial_": True}}  # fmt: skip
    module = task(make("llama", vocab_size=VOCABULARY, n_layers=3), config)
    ddp = {"strategy": DDPStrategy(), "devices": world} if world > 1 else {}
    fit(module, [share(micro_batches(4, seed), rank, world) for seed in range(3)], **ddp)
    return weights(module)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    """To the last digits (7e-8); torch's Newton-Schulz in bfloat16 makes 2e-4 of gradients that differ by 5e-10."""
    with newton_schulz_in_fp32():
        expected = trained()
    before = parameters(make("llama", vocab_size=VOCABULARY, n_layers=3))
    for found in ranks.run(__file__, tmp_path):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    moved = {name for name, weight in expected.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in expected if not name.startswith("blocks.0.")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with newton_schulz_in_fp32():
        ranks.save(trained(ranks.rank(), 2))
