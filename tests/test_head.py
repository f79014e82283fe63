"""Heads: what they compute, and that a tied weight stays one tensor under one key."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lmzoo.blocks.embed import Embed
from lmzoo.blocks.head import Classifier, Linear, Masked, Pooler, Tied
from lmzoo.checkpoint import build
from models import config, ids, logits, make

HIDDEN = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
TIED = ["gpt", "bert", "t5_v1_0", "transformer"]


def embed(**options):
    torch.manual_seed(0)
    return Embed(10, 8, **options)


def test_tied():
    e = embed()
    torch.testing.assert_close(Tied(e)(HIDDEN), HIDDEN @ e.tokens.weight.T)
    torch.testing.assert_close(Tied(e, scale="rsqrt")(HIDDEN), HIDDEN @ e.tokens.weight.T / 8**0.5)
    assert list(Tied(e).parameters()) == [] and [name for name, _ in Tied(e, bias=True).named_parameters()] == ["bias"]


def test_tied_to_narrow_vectors_goes_back_through_the_projection():
    e = embed(d_embed=3)
    torch.testing.assert_close(Tied(e)(HIDDEN), HIDDEN @ e.project.weight @ e.tokens.weight.T)


def test_linear_and_masked():
    e = embed()
    head = Linear(e)
    torch.testing.assert_close(head(HIDDEN), HIDDEN @ head.weight.T)
    head = Masked(e, activation=nn.ReLU, norm=nn.LayerNorm)
    h = (HIDDEN @ head.dense.weight.T + head.dense.bias).clamp(min=0)
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(head(HIDDEN), h @ e.tokens.weight.T + head.bias, rtol=1e-4, atol=1e-5)
    assert {name for name, _ in head.named_parameters()} == {
        "dense.weight",
        "dense.bias",
        "norm.weight",
        "norm.bias",
        "bias",
    }


@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_is_one_parameter_under_one_key(name):
    net = make(name)
    keys = [key for key, value in net.state_dict().items() if value.shape == (50, 16)]
    assert keys == ["embed.tokens.weight"]
    assert len(list(net.parameters())) == len({id(p) for p in net.parameters()}) == len(net.state_dict())


def moved(net):
    """The head's logits follow the embedding: with a zero embedding they are the head's bias, or 0."""
    before = logits(net, ids(1, 4))
    with torch.no_grad():
        net.embed.tokens.weight.zero_()
    bias = getattr(net.head, "bias", None)
    after = logits(net, ids(1, 4))
    expected = torch.zeros_like(after) if bias is None else bias.expand_as(after)
    return not torch.equal(before, after) and torch.equal(after, expected)


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize(
    "handle",
    [
        lambda net: net,
        lambda net: net.load_state_dict(copy.deepcopy(net.state_dict())) and net,
        lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True) and net,
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: net.to(torch.float64),
        lambda net: net.requires_grad_(False),
    ],
    ids=["fresh", "load", "assign", "deepcopy", "pickle", "to", "frozen"],
)
def test_tied_for_ever(name, handle):
    assert moved(handle(make(name)))


def test_tied_from_meta():
    with torch.device("meta"):
        net = build(config("gpt"))
    net = net.to_empty(device="cpu").eval()
    net.load_state_dict(make("gpt").state_dict())
    assert torch.equal(logits(net, ids(1, 4)), logits(make("gpt"), ids(1, 4))) and moved(net)


def test_gradients_of_both_uses_add_up():
    net, row = make("gpt", dropout=0.0), ids(1, 4)
    net(row).sum().backward()
    tied = net.embed.tokens.weight.grad
    apart = make("gpt", head="untied")
    state = net.state_dict()
    apart.load_state_dict(state | {"head.weight": state["embed.tokens.weight"].clone()})
    apart(row).sum().backward()
    torch.testing.assert_close(tied, apart.embed.tokens.weight.grad + apart.head.weight.grad)


MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize(
    "pool, expected",
    [
        ("first", torch.stack([HIDDEN[0, 0], HIDDEN[1, 1]])),
        ("last", torch.stack([HIDDEN[0, 1], HIDDEN[1, 2]])),
        ("mean", torch.stack([HIDDEN[0, :2].mean(0), HIDDEN[1, 1:].mean(0)])),
    ],
)
def test_pooling(pool, expected):
    head = Classifier(embed(), n_classes=4, pool=pool)
    h = (expected @ head.dense.weight.T + head.dense.bias).tanh()
    torch.testing.assert_close(head(HIDDEN, MASK), h @ head.out.weight.T + head.out.bias)
    assert head(HIDDEN).shape == (2, 4) and head(HIDDEN, MASK * 0).isfinite().all()
    assert head.bfloat16()(HIDDEN.bfloat16(), MASK).dtype == torch.bfloat16


@pytest.mark.parametrize("position", ["learned", "rotary", "t5", "alibi"])
def test_a_decoders_classifier_gives_the_same_logits_for_any_padding(position):
    net, row, pad = make("gpt", position=position), ids(1, 5), torch.zeros(1, 3, dtype=torch.long)
    torch.manual_seed(0)
    head = Classifier(net.embed, n_classes=4, pool="last").eval()

    def classes(rows, mask):
        return net(rows, mask, readout=lambda _, hidden: head(hidden, mask))

    expected = classes(row, torch.ones(1, 5))
    for left in (0, 1, 3):
        rows = torch.cat([pad[:, :left], row, pad[:, left:]], 1)
        mask = torch.zeros(1, 8)
        mask[:, left : left + 5] = 1
        torch.testing.assert_close(classes(rows, mask), expected, rtol=0, atol=1e-5)


def test_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="pool=max is unknown; there are: first, last, mean"):
        Pooler(embed(), pool="max")
