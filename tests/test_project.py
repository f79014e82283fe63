"""Layers that read the same input: one product where their weights lie side by side, the same numbers everywhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmzoo import build, compose
from lmzoo.blocks import project
from lmzoo.blocks.project import Projects, as_one, joined


class Part(Projects):
    """Three layers of one input."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, n, bias) for n in (4, 2, 3))
        self.lay_together("a", "b", "c")


def each(part, x):
    return [layer(x) for layer in (part.a, part.b, part.c)]


@pytest.fixture
def shapes(monkeypatch):
    """Of the weights of all products that `project` makes itself."""
    found = []

    class Spy:
        def linear(x, weight, bias):
            found.append(tuple(weight.shape))
            return F.linear(x, weight, bias)

    monkeypatch.setattr(project, "F", Spy)
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_gives_what_each_layer_gives(shapes, bias):
    part, x = Part(bias), torch.randn(5, 6)
    wanted = [x @ layer.weight.T + (layer.bias if bias else 0) for layer in (part.a, part.b, part.c)]
    with torch.inference_mode(), joined(part):
        torch.testing.assert_close(list(part.project(x)), wanted)
    assert shapes == [(9, 6)]
    torch.testing.assert_close(list(part.project(x)), wanted)
    assert shapes == [(9, 6)]


def test_layers_learn_each_by_itself():
    part, x = Part(), torch.randn(5, 6)
    sum(out.square().sum() for out in part.project(x)).backward()
    for layer in (part.a, part.b, part.c):
        alone = copy.deepcopy(layer)
        alone.zero_grad()
        alone(x).square().sum().backward()
        torch.testing.assert_close(layer.weight.grad, alone.weight.grad)
        torch.testing.assert_close(layer.bias.grad, alone.bias.grad)


class Twice(nn.Linear):
    """As an adapter: more than a product."""

    def forward(self, x):
        return 2 * super().forward(x)


def moved(part):
    part.b.weight.data = part.b.weight.data.clone()


def moved_bias(part):
    part.b.bias.data = part.b.bias.data.clone()


def hooked(part):
    part.c.register_forward_hook(lambda layer, inputs, output: 2 * output)


def replaced(part):
    twice = Twice(6, 4)
    twice.weight, twice.bias, part.a = part.a.weight, part.a.bias, twice


def copied(part):
    part.a, part.b, part.c = map(copy.deepcopy, (part.a, part.b, part.c))


@pytest.mark.parametrize("change", [moved, moved_bias, hooked, replaced, copied])
def test_layers_that_are_not_plain_or_not_side_by_side_do_their_own(shapes, change):
    part, x = Part(), torch.randn(5, 6)
    change(part)
    wanted = each(part, x)
    with torch.inference_mode(), joined(part):
        torch.testing.assert_close(list(part.project(x)), wanted)
    assert not shapes


def test_nothing_is_left_joined_after_an_error():
    part = Part()
    before = dict(vars(part))
    with pytest.raises(KeyError), joined(part):
        assert part.one
        raise KeyError
    assert part.one is None and dict(vars(part)) == before


@pytest.mark.parametrize(("model", "n"), [("llama", 2), ("gpt", 1)])
def test_a_net_decodes_joined_after_it_was_trained_and_loaded(tmp_path, shapes, model, n):
    torch.manual_seed(0)
    net = build(compose(f"model={model}", "task=clm", "model.d_model=16", "model.n_layers=2", "model.n_heads=2").model)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    n_bytes = sum(weight.nbytes for weight in net.parameters())
    assert (tmp_path / "net.pt").stat().st_size < n_bytes + 30_000  # none of them twice
    optimizer = torch.optim.AdamW(net.parameters())
    ids = torch.randint(net.vocab_size, (2, 8))
    net(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    net.load_state_dict(torch.load(tmp_path / "net.pt"))
    assert not shapes
    rows = net.generate(ids, max_new_tokens=4)
    assert len(shapes) == 4 * 2 * n  # steps, layers, parts of a layer
    apart = copy.deepcopy(net)
    assert as_one([apart.blocks[0].attn.q.weight, apart.blocks[0].attn.k.weight]) is None
    assert torch.equal(apart.generate(ids, max_new_tokens=4), rows) and len(shapes) == 4 * 2 * n
