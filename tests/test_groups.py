"""Which parameters are trained, which decay and at which rate, against what is worked out by hand."""

import pytest
import torch
from torch import nn

from lmzoo import UserError, optim
from models import make

PLAIN = {"lr": 0.1, "weight_decay": 0.5}


def named(net, groups):
    """{group: names of its parameters}."""
    names = {weight: name for name, weight in net.named_parameters()}
    return {group["name"]: [names[weight] for weight in group["params"]] for group in groups}


FAMILIES = ["gpt", "llama", "bert", "t5", "t5_v1_0", "transformer"]


@pytest.mark.parametrize("words", [{}, {"no_decay": ["embed*", "*.q.weight"]}, {"layer_decay": 0.5}], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_parameter_is_in_one_group(name, words):
    """BEHAVIOUR 26: tied weights too; those of fewer than two dimensions do not decay, nor those that were named."""
    net = make(name)
    groups = optim.parameter_groups(net, PLAIN | words)
    every = [weight for group in groups for weight in group["params"]]
    assert len(every) == len({*every}) and {*every} == {*net.parameters()}
    named = {n: w for n, w in net.named_parameters() if n.startswith("embed") or n.endswith(".q.weight")}
    spared = {*named.values()} if "no_decay" in words else set()
    for group in groups:
        decays = group["weight_decay"] == 0.5
        assert decays or group["weight_decay"] == 0
        assert all((weight.ndim >= 2 and weight not in spared) is decays for weight in group["params"])


def test_no_decay_adds_to_norms_and_biases():
    net = make("gpt")
    found = named(net, optim.parameter_groups(net, PLAIN | {"no_decay": ["*positions*", "embed*", "-*tokens*"]}))
    assert "positions.0.table.weight" in found["no_decay"] and "embed.tokens.weight" in found["decay"]


# --- layer-wise decay


def rates(net, **words):
    groups = optim.parameter_groups(net, PLAIN | words)
    assert [group["lr"] for group in groups] == pytest.approx([0.1 * group["lr_factor"] for group in groups])
    assert [group["lr_factor"] for group in groups] == sorted((g["lr_factor"] for g in groups), reverse=True)
    names = {weight: name for name, weight in net.named_parameters()}
    return {names[weight]: group["lr_factor"] for group in groups for weight in group["params"]}


def below(found, prefix):
    """The rates of all parameters under a name."""
    return {rate for name, rate in found.items() if name.startswith(prefix)}


def test_layer_decay_of_one_stack():
    """Three layers, by half: the head and the final norm 1, layers 1/2, 1/4, 1/8, the embeddings 1/16."""
    found = rates(make("gpt", n_layers=3, head="untied"), layer_decay=0.5)
    expected = {"head": 1, "norm.": 1, "blocks.2": 1 / 2, "blocks.1": 1 / 4, "blocks.0": 1 / 8, "embed": 1 / 16,
                "positions": 1 / 16}  # fmt: skip
    assert {prefix: below(found, prefix) for prefix in expected} == {p: {rate} for p, rate in expected.items()}
    assert len({*found.values()}) == 5


def test_layer_decay_where_the_head_has_nothing_of_its_own():
    """A tied head without a final norm: the last layer is still one below the top. The encoder's norms belong to it."""
    found = rates(make("bert", n_layers=2), layer_decay=0.5)
    assert [below(found, p) for p in ("head", "blocks.1", "blocks.0", "embed")] == [{1.0}, {0.5}, {0.25}, {0.125}]
    tied = rates(make("transformer", n_layers=1), layer_decay=0.5)
    assert below(tied, "decoder.blocks.0") == {0.5} and below(tied, "embed") == {0.125}


def test_layer_decay_of_two_stacks():
    """The decoder's two layers stand on the encoder's three; the encoder's final norm is level with what follows it."""
    found = rates(make("t5", n_layers=3, n_decoder_layers=2), layer_decay=0.5)
    expected = {"head": 0, "decoder.norm": 0, "decoder.blocks.1": 1, "decoder.blocks.0": 2, "encoder.norm": 2,
                "encoder.blocks.2": 3, "encoder.blocks.1": 4, "encoder.blocks.0": 5, "encoder.positions": 6,
                "decoder.positions": 6, "embed": 6}  # fmt: skip
    assert {p: below(found, p) for p in expected} == {p: {0.5**depth} for p, depth in expected.items()}


def test_layer_decay_of_shared_layers():
    """Six layers, each three times in a row: the upper one is last used at the top, the lower one three below it."""
    found = rates(make("gpt", n_layers=6, share=3), layer_decay=0.5)
    expected = {"norm.": 0, "blocks.1": 1, "blocks.0": 4, "embed": 7}
    assert {p: below(found, p) for p in expected} == {p: {0.5**depth} for p, depth in expected.items()}


def test_without_layer_decay_there_is_one_rate():
    assert {*rates(make("t5")).values()} == {1.0}


# --- freezing


def frozen(net):
    return {name for name, weight in net.named_parameters() if not weight.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], lambda name: False),
        (["embed*"], lambda name: name.startswith("embed")),
        (["blocks.0.*", "*norm*"], lambda name: name.startswith("blocks.0.") or "norm" in name),
        (["*", "-head*"], lambda name: not name.startswith("head")),
        (["*", "-blocks.1.*", "*.bias"], lambda name: not name.startswith("blocks.1.") or name.endswith(".bias")),
    ],
)
def test_frozen_parameters_are_in_no_group_and_get_no_gradient(patterns, expected):
    net = make("gpt", head="untied")
    optim.freeze(net, patterns)
    assert frozen(net) == {name for name, _ in net.named_parameters() if expected(name)}
    trained = [w for group in optim.parameter_groups(net, PLAIN) for w in group["params"]]
    assert {*trained} == {w for w in net.parameters() if w.requires_grad}
    net(torch.tensor([[1, 2, 3]])).sum().backward()
    assert all((weight.grad is None) is not weight.requires_grad for weight in net.parameters())


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("emebd*", "embed*"), ("blocks.9.*", "blocks.1*"), ("-haed*", "head*"), ("zzz", "embed*, positions*, blocks*")],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern, near):
    net = make("gpt", head="untied")
    with pytest.raises(UserError) as refusal:
        optim.freeze(net, ["norm*", pattern])
    assert str(refusal.value).startswith(f"optim.freeze: {pattern} matches no parameter; there are ")
    assert {*near.split(", ")} <= {*str(refusal.value).partition("there are ")[2].split(", ")}
    with pytest.raises(UserError, match="optim.no_decay: "):
        optim.parameter_groups(net, PLAIN | {"no_decay": [pattern]})


def test_nothing_left_to_train_is_refused():
    net = make("gpt")
    optim.freeze(net, ["*"])
    with pytest.raises(UserError, match="no trainable parameter"):
        optim.parameter_groups(net, PLAIN)


# --- hidden matrices


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_matrices_are_the_linear_maps_of_the_blocks(name):
    net = make(name, attention=["multi_head", "additive"] if name == "transformer" else "grouped_query")
    names = {name for name, weight in net.named_parameters() if weight in optim.hidden_matrices(net)}
    maps = (".q.weight", ".k.weight", ".v.weight", ".out.weight", ".up.weight", ".down.weight", ".gate.weight")
    assert names == {name for name, _ in net.named_parameters() if "blocks." in name and name.endswith(maps)}
    assert all(net.get_parameter(name).ndim == 2 for name in names)


def test_a_matrix_that_is_tied_to_the_embedding_is_not_hidden():
    net = make("gpt", d_ff=50, ffn="relu_no_bias")
    assert net.blocks[0].ffn.up.weight in optim.hidden_matrices(net)
    net.blocks[0].ffn.up.weight = net.embed.tokens.weight
    assert net.embed.tokens.weight not in optim.hidden_matrices(net)


def test_the_table():
    net = nn.Sequential(nn.Linear(30, 50))
    _, *lines = optim.table(optim.parameter_groups(net, PLAIN)).splitlines()
    assert [line.split() for line in lines] == [["decay", "1", "1,500", "0.5", "1"], ["no_decay", "1", "50", "0", "1"]]
