"""Encoder: sees both sides; what only an encoder does."""

import pytest
import torch

from models import POSITIONS, ids, make


def test_without_positions_it_is_permutation_equivariant():
    net, rows = make("bert", position="none"), ids(2, 7)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    torch.testing.assert_close(net(rows[:, order]), net(rows)[:, order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "none"])
def test_every_scheme_tells_positions_apart(position):
    net, rows = make("bert", position=position), ids(2, 7)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert (net(rows[:, order]) - net(rows)[:, order]).abs().max() > 1e-3


def test_every_token_sees_both_sides():
    net, rows = make("bert"), ids(1, 6)
    for changed in (0, 5):
        other = rows.clone()
        other[0, changed] = (rows[0, changed] + 1) % 50
        assert ((net(other) - net(rows)).abs().amax(-1) > 1e-4).all()


def test_token_types():
    net, rows = make("bert"), ids(1, 6)
    zeros = torch.zeros_like(rows)
    torch.testing.assert_close(net(rows, token_type_ids=zeros), net(rows))
    assert not torch.allclose(net(rows, token_type_ids=zeros + 1), net(rows))


def test_readout_is_handed_the_head_and_the_last_states():
    net, rows = make("bert", block="pre", head="untied"), ids(2, 6)
    head, hidden = net(rows, readout=lambda head, hidden: (head, hidden))
    assert head is net.head and hidden.shape == (2, 6, 16)
    torch.testing.assert_close(head(hidden), net(rows))
    torch.testing.assert_close(net(rows, readout=lambda head, hidden: head(hidden[:, 2])), net(rows)[:, 2])


def test_facts():
    net = make("bert")
    assert (net.family, net.causal, net.vocab_size, net.d_model, net.n_layers, net.max_len) == (
        "encoder",
        False,
        50,
        16,
        2,
        32,
    )
    assert net.max_positions == 32 and make("bert", position="rotary").max_positions is None


def test_longer_than_the_learned_positions():
    with pytest.raises(ValueError, match="33 tokens is longer than the model's 32 learned positions"):
        make("bert")(ids(1, 33))
    assert make("bert", position="alibi")(ids(1, 33)).shape == (1, 33, 50)


def test_packed_rows_may_be_longer_than_the_learned_positions():
    net, rows = make("bert"), ids(1, 40)
    documents = torch.tensor([[0] * 20 + [1] * 20])
    torch.testing.assert_close(net(rows, None, documents)[:, 20:], net(rows[:, 20:]), rtol=0, atol=1e-5)
