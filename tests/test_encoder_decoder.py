"""Encoder-decoder: what the decoder sees of the memory, and what the two stacks share."""

import pytest
import torch

from lmzoo.blocks.position import Buckets
from lmzoo.errors import UserError
from models import POSITIONS, ids, make

CROSS = ["t5", "multi_head", "additive"]


def test_forward_is_encode_then_decode():
    net, source, target = make("t5"), ids(2, 7), ids(2, 5, seed=2)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    torch.testing.assert_close(net(source, mask, target), net.decode(target, net.encode(source, mask), mask))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("cross", CROSS)
def test_no_position_enters_cross_attention(cross, position):
    net, source, target = make("t5", cross=cross, position=position), ids(2, 7), ids(2, 5, seed=2)
    memory, order = net.encode(source), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    got = net.decode(target, memory[:, order], mask[:, order])
    torch.testing.assert_close(got, net.decode(target, memory, mask), rtol=0, atol=1e-5)


def test_one_table_of_biases_a_stack():
    net = make("t5", n_layers=3)
    tables = {name: module for name, module in net.named_modules() if isinstance(module, Buckets)}
    assert set(tables) == {"encoder.positions.0", "decoder.positions.0"}
    assert [table.causal for table in tables.values()] == [False, True]


def test_one_embedding_for_both_sides():
    assert [key for key, p in make("t5", head="tied").state_dict().items() if 50 in p.shape] == ["embed.tokens.weight"]


def test_no_scale_in_the_attention_of_t5():
    net = make("t5")
    parts = [block.attn for block in net.encoder.blocks] + [
        part for block in net.decoder.blocks for part in (block.attn, block.cross)
    ]
    assert [part.scale for part in parts] == [1.0] * 6


def test_the_decoder_sees_all_of_the_source_and_nothing_of_its_future():
    net, source, target = make("t5"), ids(1, 6), ids(1, 5, seed=2)
    before = net(source, None, target)
    other = target.clone()
    other[0, 3] = (target[0, 3] + 1) % 50
    after = net(source, None, other)
    assert torch.equal(after[:, :3], before[:, :3]) and not torch.allclose(after[:, 3], before[:, 3])
    for changed in range(6):
        other = source.clone()
        other[0, changed] = (source[0, changed] + 1) % 50
        assert ((net(other, None, target) - before).abs().amax(-1) > 1e-5).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["t5", "t5_v1_0", "transformer"])
def test_padding_of_the_source_is_inert(name, side):
    net, source, target, pad = make(name), ids(2, 6), ids(2, 5, seed=2), torch.full((2, 3), 7)
    order = (pad, source) if side == "left" else (source, pad)
    mask = torch.cat([torch.full_like(part, part is source) for part in order], 1)
    torch.testing.assert_close(net(torch.cat(order, 1), mask, target), net(source, None, target), rtol=0, atol=1e-5)


def test_a_source_of_padding_only_gives_finite_numbers_and_gradients():
    net, source, target = make("t5"), ids(2, 6), ids(2, 5, seed=2)
    mask = torch.tensor([[1] * 6, [0] * 6])
    out = net(source, mask, target)
    out.square().sum().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in net.parameters())


def test_stacks_of_different_depth():
    net = make("t5", n_layers=3, n_decoder_layers=1)
    assert (len(net.encoder.blocks), len(net.decoder.blocks), net.n_layers) == (3, 1, 3)
    assert len(make("t5").decoder.blocks) == 2  # null: as many


def test_readout_and_facts():
    net, source, target = make("t5"), ids(2, 6), ids(2, 5, seed=2)
    hidden = net(source, None, target, readout=lambda head, hidden: hidden)
    torch.testing.assert_close(net.head(hidden), net(source, None, target))
    assert (net.family, net.vocab_size, net.d_model, net.max_len, net.max_positions) == (
        "encoder-decoder",
        50,
        16,
        32,
        None,
    )


def test_learned_positions_bind_both_sides():
    net = make("t5", position="learned")
    for source, target in ((33, 4), (4, 33)):
        with pytest.raises(ValueError, match="33 tokens is longer than the model's 32 learned positions"):
            net(ids(1, source), None, ids(1, target))


def test_the_second_place_is_the_masks():
    net, source = make("t5"), ids(2, 6)
    for answers in ids(2, 5, seed=2), ids(2, 6, seed=2):
        with pytest.raises(UserError, match=r"called as net\(input_ids, attention_mask, decoder_input_ids\)"):
            net(source, answers)
    for words in ((source, ids(2, 5), source), (source, None, source, torch.ones(2, 5)), (source, None, [[1], [2]])):
        with pytest.raises(UserError, match="input_ids"):
            net(*words)
