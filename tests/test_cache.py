"""Cached decoding gives the logits of the full forward, however the row is cut."""

import pytest
import torch

from lmzoo.blocks.cache import Cache, KeyValues
from models import POSITIONS, attention, ids, make

LENGTH = 11
CUTS = {"prefill": [LENGTH], "steps": [1] * LENGTH, "chunks": [4, 1, 3, 1, 2], "prompt and steps": [6, 1, 1, 1, 1, 1]}
DECODERS = {
    **{f"{name} positions": {"position": name} for name in POSITIONS},
    "grouped": {"attention": "grouped_query", "position": "rotary"},
    "multi-query": {"attention": "multi_query"},
    "window": {"attention": attention(window=3), "position": "rotary"},
    "window and bias": {"attention": attention(window=3), "position": "t5"},
    "one window in two layers": {"attention": [attention(window=2), attention()], "position": "alibi", "n_layers": 3},
    "matmul": {"attention": attention(window=4, backend="matmul"), "position": "t5"},
    "norms on queries": {"attention": "qk_norm", "position": "rotary"},
    "additive": {"attention": "additive", "position": "t5"},
    "parallel": {"block": "parallel"},
    "shared layers": {"n_layers": 4, "share": 2, "position": "rotary"},
}


def in_pieces(step, sizes):
    """The logits of step(from, to) over pieces of these sizes, put together."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return torch.cat([step(end - size, end) for size, end in zip(sizes, ends, strict=True)], 1)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name, cut):
    net, rows = make("gpt", **DECODERS[name]), ids(3, LENGTH)
    cache = net.cache(3, LENGTH)
    with torch.no_grad():
        close(in_pieces(lambda a, b: net(rows[:, a:b], cache=cache), CUTS[cut]), net(rows))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_with_padding(name, cut):
    net, rows, mask = make("gpt", **DECODERS[name]), ids(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, :5], mask[1, :1], mask[2, -3:] = 0, 0, 0
    cache = net.cache(3, LENGTH)
    with torch.no_grad():
        got = in_pieces(lambda a, b: net(rows[:, a:b], mask[:, a:b], cache=cache), CUTS[cut])
        close(got[mask.bool()], net(rows, mask)[mask.bool()])


@pytest.mark.parametrize("name", ["learned positions", "t5 positions", "window and bias", "grouped"])
def test_documents(name):
    net, rows = make("gpt", **DECODERS[name]), ids(2, LENGTH)
    documents = torch.tensor([[0] * 4 + [1] * 7, [3] * 9 + [1] * 2])
    cache = net.cache(2, LENGTH)
    with torch.no_grad():
        got = in_pieces(lambda a, b: net(rows[:, a:b], None, documents[:, a:b], cache=cache), CUTS["chunks"])
        close(got, net(rows, None, documents))


def test_a_mask_given_only_once_holds_for_what_was_read():
    net, rows, mask = make("gpt"), ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    cache = net.cache(2, LENGTH)
    with torch.no_grad():
        net(rows[:, :6], mask[:, :6], cache=cache)
        close(net(rows[:, 6:], cache=cache), net(rows, mask)[:, 6:])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("cross", ["t5", "additive", attention(backend="matmul")], ids=["sdpa", "additive", "matmul"])
@pytest.mark.parametrize("position", ["t5", "learned", "rotary"])
def test_encoder_decoder(position, cross, cut):
    net, source, target = make("t5", position=position, cross=cross), ids(2, 7), ids(2, LENGTH, seed=2)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    cache = net.cache(2, LENGTH)
    with torch.no_grad():
        memory = net.encode(source, mask)
        got = in_pieces(lambda a, b: net.decode(target[:, a:b], memory, mask, cache=cache), CUTS[cut])
        close(got, net(source, mask, target))


def test_under_bfloat16_autocast():
    net, rows = make("llama", attention="grouped_query"), ids(2, LENGTH)
    cache = net.cache(2, LENGTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = in_pieces(lambda a, b: net(rows[:, a:b], cache=cache), CUTS["chunks"])
        torch.testing.assert_close(got, net(rows), rtol=0.05, atol=0.1)


def test_a_bfloat16_model_remembers_in_bfloat16():
    net, rows = make("llama").bfloat16(), ids(1, LENGTH)
    cache = net.cache(1, LENGTH)
    with torch.no_grad():
        net(rows, cache=cache)
    assert cache.length == LENGTH and cache.layers[0].keys.dtype == torch.bfloat16


def test_keys_are_appended_in_place():
    store = KeyValues(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    store.append(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    keys, values = store.append(torch.full((1, 1, 1, 2), 5.0), torch.full((1, 1, 1, 2), 7.0), 2)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 5] and values[0, 0, :, 1].tolist() == [1, 1, 7]
    assert keys.data_ptr() == store.keys.data_ptr()


def test_too_short_a_cache_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="max_len=4 is too short for 5 tokens"):
        Cache([], max_len=4).extend(batch=1, n_new=5, keep=None, documents=None)


def test_nothing_is_kept_on_the_model():
    net, rows = make("gpt"), ids(1, 5)
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    with torch.no_grad():
        net(rows, cache=net.cache(1, 5))
    assert before == {name: set(vars(module)) for name, module in net.named_modules()}
