"""Decoder: nothing of the future."""

import pytest
import torch

from models import POSITIONS, attention, ids, make

ATTENTIONS = {name: name for name in ("multi_head", "grouped_query", "multi_query", "qk_norm", "t5", "additive")}
ATTENTIONS |= {"window": attention(window=3), "matmul": attention(backend="matmul")}
PAIRS = [(a, p) for a in ATTENTIONS for p in POSITIONS if not (a == "additive" and p.startswith("rotary"))]


@pytest.mark.parametrize("kind, position", PAIRS)
def test_future_tokens_move_no_past_logit(kind, position):
    net, rows = make("gpt", attention=ATTENTIONS[kind], position=position), ids(1, 8)
    before = net(rows)
    for changed in (3, 7):
        other = rows.clone()
        other[0, changed] = (rows[0, changed] + 1) % 50
        after = net(other)
        assert torch.equal(after[:, :changed], before[:, :changed]) and not torch.allclose(
            after[:, changed], before[:, changed]
        )


@pytest.mark.parametrize("block", ["pre", "post", "parallel", "sandwich"])
def test_nor_do_their_gradients(block):
    net, rows = make("gpt", block=block), ids(1, 6)
    hidden = {}
    net.embed.register_forward_hook(lambda module, args, out: hidden.update(x=out.requires_grad_()))
    net(rows)[0, 2].sum().backward(inputs=[(x := hidden["x"])])
    reach = x.grad[0].abs().amax(-1) > 0
    assert reach.tolist() == [True] * 3 + [False] * 3


def test_a_window_ends_the_past():
    net, rows = make("gpt", attention=attention(window=3), n_layers=1, position="none"), ids(1, 8)
    other = rows.clone()
    other[0, 2] = (rows[0, 2] + 1) % 50
    moved = ((net(other) - net(rows)).abs().amax(-1) > 1e-6)[0]
    assert moved.tolist() == [False, False, True, True, True, False, False, False]


def test_a_causal_model_tells_positions_apart_without_any_scheme():
    net = make("gpt", position="none")
    assert not torch.allclose(net(torch.tensor([[1, 2, 3]]))[0, -1], net(torch.tensor([[2, 1, 3]]))[0, -1], atol=1e-4)


def test_facts():
    assert (make("gpt").family, make("gpt").causal) == ("decoder", True)


def test_the_cache_counts_towards_the_learned_positions():
    net = make("gpt")
    cache = net.cache(1, 40)
    net(ids(1, 30), cache=cache)
    with pytest.raises(ValueError, match="33 tokens is longer than the model's 32 learned positions"):
        net(ids(1, 3), cache=cache)


def test_generate_is_the_functions():
    from lmzoo.decoding import generate

    net, rows = make("gpt"), ids(1, 4)
    assert torch.equal(net.generate(rows, max_new_tokens=5), generate(net, rows, max_new_tokens=5))
