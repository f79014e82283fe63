"""Who sees whom, drawn by hand (x: sees), and positions counted by hand."""

import pytest
import torch

from lmzoo.blocks.cache import Cache
from lmzoo.blocks.layout import Layout, count_positions
from lmzoo.blocks.position import Alibi


def layout(length, mask=None, documents=None, causal=True, cache=None):
    mask = None if mask is None else torch.tensor([mask])
    documents = None if documents is None else torch.tensor([documents])
    return Layout.of(torch.zeros(1, length, dtype=torch.long), mask, documents, causal, cache)


def drawn(allowed):
    return ["".join("x" if seen else "." for seen in row) for row in allowed[0, 0].tolist()]


def test_causal():
    assert drawn(layout(4).allowed()) == ["x...", "xx..", "xxx.", "xxxx"]


def test_everyone_sees_everyone_without_any_rule():
    assert layout(4, causal=False).allowed() is None


def test_causal_window_counts_the_query_itself():
    assert drawn(layout(5).allowed(window=2)) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]


@pytest.mark.parametrize("window", [2, 3])
def test_bidirectional_window_is_half_to_each_side(window):
    assert drawn(layout(5, causal=False).allowed(window=window)) == ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]


def test_two_documents_and_a_column_of_padding():
    facts = layout(6, [1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, -1])
    assert drawn(facts.allowed()) == ["x.....", "xx....", "xxx...", "...x..", "...xx.", "xxxxxx"]
    assert facts.q_positions.tolist() == [[0, 1, 2, 0, 1, 0]]


def test_documents_in_both_directions():
    assert drawn(layout(4, documents=[5, 5, 2, 2], causal=False).allowed()) == ["xx..", "xx..", "..xx", "..xx"]


def test_left_padding_causal():
    facts = layout(5, [0, 0, 1, 1, 1])
    assert drawn(facts.allowed())[2:] == ["..x..", "..xx.", "..xxx"]
    assert facts.q_positions[0, 2:].tolist() == [0, 1, 2]


def test_padding_in_both_directions():
    assert drawn(layout(4, [0, 1, 1, 0], causal=False).allowed()) == [".xx."]  # one line for all queries


def test_a_row_of_padding_only_sees_everything():
    assert drawn(layout(3, [0, 0, 0]).allowed()) == ["xxx"] * 3


def test_window_is_measured_in_positions_not_in_columns():
    # a hole in the middle: tokens a b . c, window 2: c still sees b
    assert drawn(layout(4, [1, 1, 0, 1]).allowed(window=2))[3] == ".x.x"


def test_window_within_documents():
    facts = layout(6, documents=[0, 0, 0, 0, 1, 1])
    assert drawn(facts.allowed(window=2)) == ["x.....", "xx....", ".xx...", "..xx..", "....x.", "....xx"]


def test_offset_into_a_cache():
    cache = Cache([], max_len=5)
    layout(3, cache=cache)
    cache.length = 3
    facts = layout(2, cache=cache)
    assert (facts.offset, facts.q_positions.tolist(), facts.k_positions.tolist()) == (3, [[3, 4]], [[0, 1, 2, 3, 4]])
    assert drawn(facts.allowed()) == ["xxxx.", "xxxxx"]
    assert drawn(facts.allowed(window=2)) == ["..xx.", "...xx"]


def test_the_cache_remembers_padding_and_documents():
    cache = Cache([], max_len=8)
    layout(3, [0, 1, 1], cache=cache)
    cache.length = 3
    facts = layout(1, cache=cache)
    assert drawn(facts.allowed()) == [".xxx"]
    assert facts.q_positions.tolist() == [[2]]

    cache = Cache([], max_len=8)
    layout(3, documents=[0, 0, 1], cache=cache)
    cache.length = 3
    facts = layout(2, documents=[1, 2], cache=cache)
    assert drawn(facts.allowed()) == ["..xx.", "....x"]
    assert facts.q_positions.tolist() == [[1, 0]]


def test_across_from_a_decoder_to_its_memory():
    queries, memory = layout(3, documents=[0, 0, 1]), torch.zeros(1, 4, 2)
    facts = queries.over(memory, torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 1, -1]]))
    assert drawn(facts.allowed()) == ["x...", "x...", ".xx."]
    assert drawn(queries.over(memory, torch.tensor([[1, 1, 0, 0]])).allowed()) == ["xx.."]
    assert queries.over(memory, None).allowed() is None


@pytest.mark.parametrize(
    "keep, documents, positions",
    [
        ([1, 1, 1, 0, 0], None, [0, 1, 2, None, None]),
        ([0, 0, 1, 1, 1], None, [None, None, 0, 1, 2]),
        ([1, 0, 1, 1, 1], None, [0, None, 1, 2, 3]),
        (None, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]),
        (None, [7, 7, 3, 3, 9], [0, 1, 0, 1, 0]),
        ([1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 2, None]),
        ([0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [None, 0, 1, 0, 1]),
    ],
)
def test_positions_count_kept_tokens_of_the_own_document(keep, documents, positions):
    keep = None if keep is None else torch.tensor([keep]).bool()
    documents = None if documents is None else torch.tensor([documents])
    counted = count_positions(keep, documents)[0].tolist()
    assert [c for c, p in zip(counted, positions, strict=True) if p is not None] == [
        p for p in positions if p is not None
    ]


def test_lowered_to_the_cheapest_form():
    assert layout(4).lower(None, None, torch.float32, dense=False) == (None, True)
    assert layout(4).lower(None, 4, torch.float32, dense=False) == (None, True)  # a window as long as the row
    assert layout(1).lower(None, None, torch.float32, dense=False) == (None, False)
    assert layout(4, causal=False).lower(None, None, torch.float32, dense=True) == (None, False)
    mask, is_causal = layout(4, [1, 1, 1, 0]).lower(None, None, torch.float32, dense=False)
    assert (mask.dtype, is_causal) == (torch.bool, False)


def test_a_bias_is_added_where_seen():
    facts = layout(3)
    position = Alibi(d_model=4, n_heads=1, d_head=4, max_len=8, causal=True)  # slope 2^-8
    mask, is_causal = facts.lower(position, None, torch.float32, dense=False)
    none, step = float("-inf"), -(2.0**-8)
    assert not is_causal
    assert mask[0, 0].tolist() == [[0, none, none], [step, 0, none], [2 * step, step, 0]]
    assert facts.lower(position, None, torch.float32, dense=False)[0] is mask  # made once
    assert facts.lower(position, None, torch.bfloat16, dense=False)[0].dtype == torch.bfloat16
