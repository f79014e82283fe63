"""Layers that read the same input, as the queries, keys and values of attention: in decoding one product does for all.

A step of decoding is so short that the calls count. The weights of such layers lie side by side in memory, and looked
at as one they are the matrix of all: nothing is copied, and each stays a parameter of its own for optimizers and
adapters. Where they have been moved apart (to another device or dtype), each layer does its own product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projects(nn.Module):
    """A part that has such layers; ``one``: their matrix, their bias and the width of each, while a net is `joined`."""

    together: tuple[str, ...] = ()
    one: tuple[Tensor, Tensor | None, list[int]] | None = None

    def lay_together(self, *names: str) -> None:
        """Say which layers these are, and move their weights to one piece of memory, in this order."""
        self.together, layers = names, [self.get_submodule(name) for name in names]
        for kind in ("weight", "bias"):
            parts = [getattr(layer, kind) for layer in layers]
            if parts[0] is not None:
                whole = torch.cat([part.data for part in parts])
                for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                    part.data = place

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """x (..., D) -> what each of the layers makes of it."""
        if self.one is None:
            return [getattr(self, name)(x) for name in self.together]
        weight, bias, widths = self.one
        return F.linear(x, weight, bias).split(widths, -1)


@contextmanager
def joined(net: nn.Module) -> Iterator[None]:
    """Within, the layers of a part that can do with one product do. No weight may be moved or learned."""
    parts = [part for part in net.modules() if isinstance(part, Projects)]
    for part in parts:
        layers = [part.get_submodule(name) for name in part.together]
        if layers and all(map(_plain, layers)):
            weight, bias = as_one([layer.weight for layer in layers]), as_one([layer.bias for layer in layers])
            if weight is not None and (bias is None) == (layers[0].bias is None):
                part.one = weight, bias, [layer.out_features for layer in layers]
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("one", None)


@torch.no_grad()
def as_one(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors that lie side by side as one, over their first dimension; None where they don't, or are none."""
    first = parts[0]
    if first is None:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or part.stride() != first.stride():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _plain(layer: nn.Module) -> bool:
    """Whether all that a layer does is its product: an adapter does more, and a hook waits for its call."""
    return type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
