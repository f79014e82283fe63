"""Cached decoding gives the logits of the full forward, however the row is cut."""

import pytest
import torch

from lmzoo.blocks.cache import Cache, KeyValues, ring_columns
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


GROUPED = {"_target_": "lmzoo.blocks.attention.GroupedQuery", "_partial_": True, "group": 2}
RINGS = {
    "rotary": {"position": "rotary"},
    "grouped and bias": {"position": "t5", "attention": GROUPED | {"window": 3}},
    "alibi": {"position": "alibi"},
    "matmul": {"position": "t5", "attention": attention(window=3, backend="matmul")},
    "one window in two layers": {"position": "rotary", "attention": [attention(window=3), attention()], "n_layers": 3},
}


@pytest.mark.parametrize("cut", [[30], [1] * 30, [2] * 15, [5, 1, 1, 8, 1, 3, 1, 1, 9], [2, 1, 27], [29, 1]], ids=str)
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_many_times_gone_round(name, cut):
    net, rows, mask = make("gpt", **{"attention": attention(window=3), **RINGS[name]}), ids(3, 30), torch.ones(3, 30)
    mask[0, :4], mask[1, :29] = 0, 0
    plain, padded, kept = net.cache(3, 30), net.cache(3, 30), mask.bool()
    with torch.no_grad():
        close(in_pieces(lambda a, b: net(rows[:, a:b], cache=plain), cut), net(rows))
        got = in_pieces(lambda a, b: net(rows[:, a:b], mask[:, a:b], cache=padded), cut)
        close(got[kept], net(rows, mask)[kept])


def test_a_rings_memory_is_the_windows_and_none_is_allocated_later():
    net = make("gpt", attention=[attention(window=3), attention()], position="rotary")
    cache = net.cache(2, 500)
    assert [layer.keys.shape[2] for layer in cache.layers] == [3, 500]
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    with torch.no_grad():
        for column in range(20):
            net(ids(2, 1, seed=column), cache=cache)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == places
    assert [layer.keys.shape[2] for layer in net.cache(2, 3).layers] == [3, 3]


def test_what_a_ring_hands_out():
    assert ring_columns(4, 5, 6).tolist() == [4, 5, 2, 3]
    assert ring_columns(4, 5, 8).tolist() == [2, 3, 4, 5, 6, 7]
    assert ring_columns(4, 0, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_padding_amid_a_row_with_a_ring_is_refused():
    net, rows, mask = make("gpt", attention=attention(window=3)), ids(1, 6), torch.tensor([[1, 1, 0, 0, 1, 1]])
    with torch.no_grad():
        with pytest.raises(ValueError, match="padding at the left only"):
            net(rows, mask, cache=net.cache(1, 9))
        cache = net.cache(1, 9)
        net(rows[:, :4], mask[:, :4], cache=cache)
        with pytest.raises(ValueError, match="padding at the left only"):
            net(rows[:, 4:], cache=cache)
        make("gpt")(rows, mask, cache=make("gpt").cache(1, 9))  # without a window there is no ring


@pytest.mark.parametrize("words", [{"position": "rotary"}, {"attention": attention(window=3)}], ids=["whole", "ring"])
def test_rows_that_are_spread_and_reordered(words):
    net, rows, mask = make("gpt", **words), ids(2, 6), torch.tensor([[1] * 6, [0, 0] + [1] * 4])
    new, order = ids(6, 4, seed=3), torch.tensor([2, 0, 0, 5, 3, 3])
    cache = net.cache(6, 10)
    with torch.no_grad():
        net(rows, mask, cache=cache)
        cache.spread(3)
        net(new[:, :1], cache=cache)
        cache.reorder(order)
        got = net(new[:, 1:], cache=cache)
        whole = torch.cat([rows.repeat_interleave(3, 0), new[order, :1], new[:, 1:]], 1)
        kept = torch.cat([mask.repeat_interleave(3, 0), torch.ones(6, 4, dtype=torch.long)], 1)
        close(got, net(whole, kept)[:, 7:])


def test_each_step_reads_one_column_and_what_is_filled():
    """The cost of a token: one position through the layers, attention over what was read and no more."""
    net, seen = make("gpt", position="rotary"), []
    attn = net.blocks[0].attn
    attend = attn.attend
    attn.attend = lambda q, k, v, *rest: seen.append((q.shape[2], k.shape[2])) or attend(q, k, v, *rest)
    cache = net.cache(1, 400)
    with torch.no_grad():
        net(ids(1, 5), cache=cache)
        for _ in range(3):
            net(ids(1, 1), cache=cache)
    assert seen == [(5, 5), (1, 6), (1, 7), (1, 8)]
