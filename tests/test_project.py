"""Layers that read the same input: one product where their weights lie side by side, the same numbers everywhere."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmzoo import build, compose
from lmzoo.blocks import project as module
from lmzoo.blocks.project import as_one, lay_side_by_side, project


def layers(bias=True):
    torch.manual_seed(0)
    found = [nn.Linear(6, n, bias) for n in (4, 2, 3)]
    lay_side_by_side(*found)
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_each_layer_gives(monkeypatch, bias):
    parts, x, shapes = layers(bias), torch.randn(5, 6), []
    linear = SimpleNamespace(linear=lambda x, weight, bias: shapes.append(weight.shape) or F.linear(x, weight, bias))
    monkeypatch.setattr(module, "F", linear)
    wanted = [x @ part.weight.T + (part.bias if bias else 0) for part in parts]
    with torch.inference_mode():
        found = project(x, *parts)
    assert shapes == [(9, 6)]
    torch.testing.assert_close(list(found), wanted)
    torch.testing.assert_close(list(project(x, *parts)), wanted)


def test_layers_learn_each_by_itself():
    parts, x = layers(), torch.randn(5, 6)
    sum(out.square().sum() for out in project(x, *parts)).backward()
    for part in parts:
        alone = copy.deepcopy(part)
        alone.zero_grad()
        F.linear(x, alone.weight, alone.bias).square().sum().backward()
        torch.testing.assert_close(part.weight.grad, alone.weight.grad)
        torch.testing.assert_close(part.bias.grad, alone.bias.grad)


def moved(parts):
    parts[1].weight.data = parts[1].weight.data.clone()


def hooked(parts):
    parts[2].register_forward_hook(lambda layer, inputs, output: 2 * output)


def replaced(parts):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    twice = Twice(6, 4)
    twice.weight, twice.bias = parts[0].weight, parts[0].bias
    parts[0] = twice


def turned_round(parts):
    parts.reverse()


@pytest.mark.parametrize("change", [moved, hooked, replaced, turned_round])
def test_layers_that_are_not_plain_or_not_side_by_side_do_their_own(change):
    parts, x = layers(), torch.randn(5, 6)
    change(parts)
    wanted = [part(x) for part in parts]
    with torch.inference_mode():
        torch.testing.assert_close(list(project(x, *parts)), wanted)


def test_weights_of_a_net_stay_side_by_side_when_they_are_trained_and_loaded(tmp_path):
    torch.manual_seed(0)
    net = build(compose("model=llama", "task=clm", "model.d_model=16", "model.n_layers=1", "model.n_heads=2").model)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    n_bytes = sum(weight.nbytes for weight in net.parameters())
    assert (tmp_path / "net.pt").stat().st_size < n_bytes + 20_000  # none of them twice
    trained = net.blocks[0]
    optimizer = torch.optim.AdamW(net.parameters())
    ids = torch.randint(net.vocab_size, (2, 8))
    net(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    net.load_state_dict(torch.load(tmp_path / "net.pt"))
    for group in ([trained.attn.q, trained.attn.k, trained.attn.v], [trained.ffn.gate, trained.ffn.up]):
        assert as_one([layer.weight for layer in group]) is not None
    apart = copy.deepcopy(net).eval()
    assert as_one([apart.blocks[0].ffn.gate.weight, apart.blocks[0].ffn.up.weight]) is None
    with torch.inference_mode():
        torch.testing.assert_close(net.eval()(ids), apart(ids))
