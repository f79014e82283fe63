"""How layers are made from recipes, and run."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lmzoo.blocks.position import Alibi, Rotary
from lmzoo.checkpoint import build
from lmzoo.errors import UserError
from models import CONF, FAMILIES, attention, config, ids, logits, make

EVERY = ["gpt", "llama", "bert", "t5", "t5_v1_0", "transformer"]


def count(net):
    return sum(p.numel() for p in net.parameters())


def test_share_uses_each_layer_n_times_in_a_row():
    shared, plain = make("gpt", n_layers=4, share=2), make("gpt", n_layers=4)
    assert len(shared.blocks) == 2
    state = {}
    for key, value in shared.state_dict().items():
        if key.startswith("blocks."):
            _, i, rest = key.split(".", 2)
            state |= {f"blocks.{2 * int(i)}.{rest}": value, f"blocks.{2 * int(i) + 1}.{rest}": value}
        else:
            state[key] = value
    plain.load_state_dict(state)
    torch.testing.assert_close(shared(ids(2, 6)), plain(ids(2, 6)))


def test_lists_of_recipes_alternate():
    net = make("gpt", n_layers=4, attention=[attention(window=2), attention()], ffn=["swiglu", "relu", "relu", "relu"],
               position=["rotary", "alibi"])  # fmt: skip
    assert [block.attn.window for block in net.blocks] == [2, None, 2, None]
    assert [hasattr(block.ffn, "gate") for block in net.blocks] == [True, False, False, False]
    assert [type(position) for position in net.positions] == [Rotary, Alibi]
    seen = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(type(args[2])))
    net(ids(1, 5))
    assert seen == [Rotary, Alibi, Rotary, Alibi]


def test_one_position_scheme_serves_all_layers():
    # the table of T5: 32 buckets x 4 heads, once, whatever the number of layers
    assert [key for key in make("gpt", position="t5", n_layers=3).state_dict() if "table" in key] == [
        "positions.0.table.weight"
    ]


def test_a_part_may_differ_from_layer_to_layer_in_what_it_sees():
    # a window of 1 in the first layer, none in the second: information still flows through the second
    net, row = make("gpt", attention=[attention(window=1), attention()]), ids(1, 6)
    narrow = make("gpt", attention=attention(window=1))
    other = row.clone()
    other[0, 0] = (row[0, 0] + 1) % 50
    assert not torch.allclose(net(row)[0, -1], net(other)[0, -1])
    torch.testing.assert_close(narrow(row)[0, -1], narrow(other)[0, -1])


def test_final_norm():
    assert isinstance(make("gpt").norm, torch.nn.LayerNorm) and isinstance(make("bert").norm, torch.nn.Identity)


@pytest.mark.parametrize(
    "words, message",
    [
        ({"d_model": 100, "n_heads": 12}, "d_model=100 is not divisible by n_heads=12"),
        ({"n_layers": 5, "share": 2}, "n_layers=5 is not divisible by share=2"),
        ({"n_kv_heads": 3}, "n_heads=4 is not divisible by n_kv_heads=3"),
        ({"position": "sinusoidal", "d_model": 15, "d_head": 4}, "d_model=15"),
        ({"position": "rotary", "d_head": 5}, "d_head=5"),
        ({"position": "rotary", "attention": "additive"}, "rotary positions need attention by dot products"),
        ({"position": ["alibi", "rotary"], "attention": "additive"}, "rotary positions need attention by dot products"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_fit_is_refused_when_it_is_built(family, words, message):
    with pytest.raises(UserError, match=message), torch.device("meta"):
        build(config(FAMILIES[family], **words))


def test_rotary_and_additive_in_layers_apart_are_fine():
    net = make("gpt", position=["rotary", "alibi"], attention=["multi_head", "additive"])
    assert net(ids(1, 4)).isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_activation_checkpointing_changes_nothing(name):
    # learned biases and windows: what is made once for all layers must not belong to the first one's graph
    net, rows = make(name, position="t5", attention=attention(window=3), n_layers=3), ids(2, 7)
    mask = torch.ones_like(rows)
    mask[0, -2:] = 0

    def gradients():
        net.zero_grad()
        logits(net, rows, mask).square().sum().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

    expected = gradients()
    for module in list(net.modules()):
        for block in getattr(module, "blocks", []):
            run = block.forward
            block.forward = lambda *args, run=run, **words: checkpoint(run, *args, use_reentrant=False, **words)
    got = gradients()
    assert got.keys() == expected.keys()
    for key in got:
        torch.testing.assert_close(got[key], expected[key])


@pytest.mark.parametrize("name", EVERY)
def test_copies_are_equal_and_apart(name):
    net = make(name)
    other = copy.deepcopy(net)
    assert torch.equal(logits(other, ids(1, 5)), logits(net, ids(1, 5)))
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in other.parameters()}


@pytest.mark.parametrize("name", EVERY)
def test_built_on_meta_without_any_memory(name):
    with torch.device("meta"):
        net = build(config(name))
    assert all(p.is_meta for p in net.parameters()) and count(net) == count(make(name))
    assert logits(net, torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 50)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4)])
def test_smallest_rows(name, shape):
    assert logits(make(name), ids(*shape), torch.ones(shape)).isfinite().all()


@pytest.mark.parametrize("name", EVERY)
def test_each_row_of_a_batch_gives_what_it_gives_alone(name):
    net, rows = make(name), ids(4, 6)
    got = logits(net, rows)
    for i in range(4):
        torch.testing.assert_close(got[i : i + 1], logits(net, rows[i : i + 1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_dropout_acts_in_training_only(name):
    net, rows = make(name, dropout=0.3), ids(2, 6)
    assert torch.equal(logits(net, rows), logits(net, rows))
    net.train()
    assert not torch.equal(logits(net, rows), logits(net, rows))


def test_dropouts_can_be_set_apart():
    net = make("gpt", dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    block = net.blocks[0]
    assert (block.drop.p, block.attn.dropout, block.ffn.drop.p, net.embed.drop.p) == (0.1, 0.2, 0.3, 0.1)
    assert make("gpt", dropout=0.1).blocks[0].attn.dropout == 0.1  # null: as dropout


@pytest.mark.parametrize(
    "kind, name", [("embed", "bert"), ("head", "bert"), ("init", "bert"), ("norm", "bert"), ("cross", "t5")]
)
def test_every_part_of_the_other_groups_is_built_and_run(kind, name):
    for file in sorted((CONF / "model" / kind).iterdir()):
        out = logits(make(name, **{kind: file.name.removesuffix(".yaml")}), ids(2, 5))
        assert out.isfinite().all() and out.shape == ((2, 16) if file.name == "pooler.yaml" else (2, 5, 50)), file.name
