"""The residual wiring of each block, written out with parts that only multiply."""

import pytest
import torch
from torch import nn

from lmzoo.blocks.block import Parallel, PostNorm, PreNorm, Sandwich


class Times(nn.Module):
    """A part that multiplies, and takes whatever else it is handed."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x, *args, memory=None, **words):
        return self.factor * x + (0 if memory is None else memory)


def norm(d_model):
    return nn.LayerNorm(d_model, elementwise_affine=False)


def block(kind, cross=False, dropout=0.0):
    return kind(Times(2), Times(3), norm, d_model=4, dropout=dropout, cross=Times(5) if cross else None)


X, MEMORY, N = torch.tensor([[[1.0, 2.0, 4.0, 9.0]]]), torch.tensor([[[0.5, 0.0, 1.0, 0.0]]]), norm(4)


def pre(x, f):
    return x + f(N(x))


def post(x, f):
    return N(x + f(x))


def sandwich(x, f):
    return x + N(f(N(x)))


@pytest.mark.parametrize("kind, step", [(PreNorm, pre), (PostNorm, post), (Sandwich, sandwich)])
@pytest.mark.parametrize("cross", [False, True])
def test_one_part_after_the_other(kind, step, cross):
    y = step(X, lambda h: 2 * h)
    if cross:
        y = step(y, lambda h: 5 * h + MEMORY)
    y = step(y, lambda h: 3 * h)
    torch.testing.assert_close(block(kind, cross)(X, None, None, memory=MEMORY if cross else None), y)


def test_parallel_reads_one_norm():
    h = N(X)
    torch.testing.assert_close(block(Parallel)(X, None, None), X + 2 * h + 3 * h)
    torch.testing.assert_close(
        block(Parallel, cross=True)(X, None, None, memory=MEMORY), X + 2 * h + 3 * h + 5 * h + MEMORY
    )


def test_the_stack_ends_with_a_norm_unless_each_layer_does():
    assert [kind.final_norm for kind in (PreNorm, PostNorm, Sandwich, Parallel)] == [True, False, True, True]


@pytest.mark.parametrize("kind", [PreNorm, Sandwich, Parallel])
def test_dropout_leaves_the_residual_alone(kind):
    layer = block(kind, dropout=1.0)
    assert torch.equal(layer(X, None, None), X)
    assert not torch.equal(layer.eval()(X, None, None), X)
