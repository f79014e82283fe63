"""From ids to vectors, in the order that each paper gives."""

import torch
from torch import nn

from lmzoo.blocks.embed import Embed
from lmzoo.blocks.position import Learned, Position

PLACE = {"d_model": 8, "n_heads": 2, "d_head": 4, "max_len": 16, "causal": True}
ROW, AT = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 1, 2]])


def test_tokens():
    embed = Embed(10, 8)
    assert torch.equal(embed(ROW, Position(**PLACE), AT), embed.tokens.weight[ROW])


def test_scale_comes_before_the_positions():
    embed, position = Embed(10, 8, scale="sqrt"), Learned(**PLACE)
    expected = embed.tokens.weight[ROW] * 8**0.5 + position.table.weight[AT]
    torch.testing.assert_close(embed(ROW, position, AT), expected)


def test_types_and_norm_of_bert():
    embed, position = Embed(10, 8, n_types=2, norm=nn.LayerNorm), Learned(**PLACE)
    types = torch.tensor([[0, 1, 1]])
    summed = embed.tokens.weight[ROW] + embed.types.weight[types] + position.table.weight[AT]
    expected = (summed - summed.mean(-1, keepdim=True)) / (summed.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(embed(ROW, position, AT, types), expected)
    zeros = torch.zeros_like(types)
    torch.testing.assert_close(embed(ROW, position, AT), embed(ROW, position, AT, zeros))  # none given: all of type 0


def test_narrow_vectors_are_projected():
    embed = Embed(10, 8, d_embed=3)
    assert embed.tokens.weight.shape == (10, 3)
    expected = embed.tokens.weight[ROW] @ embed.project.weight.T + embed.project.bias
    torch.testing.assert_close(embed(ROW, Position(**PLACE), AT), expected)


def test_dropout_in_training_only():
    embed, ones = Embed(10, 8, dropout=0.5), torch.zeros(1, 500, dtype=torch.long)
    with torch.no_grad():
        embed.tokens.weight.fill_(1.0)
        noisy = embed(ones, Position(**PLACE), ones)
        assert set(noisy.unique().tolist()) == {0.0, 2.0} and abs(noisy.mean() - 1) < 0.1
        assert (embed.eval()(ones, Position(**PLACE), ones) == 1).all()
