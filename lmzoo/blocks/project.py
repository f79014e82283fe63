"""Several linear layers that read the same input: where nothing is learned from it, one product does for all of them.

A step of decoding is so short that the calls count. Weights that lie side by side in memory are, looked at as one, the
matrix of all these layers: nothing is copied, and each stays a parameter of its own for optimizers and adapters. Where
they have been moved apart (another device or dtype, slices on several devices), each layer does its own product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def lay_side_by_side(*layers: nn.Linear) -> None:
    """Move the weights of ``layers`` to one piece of memory, in this order; their biases too."""
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is not None:
            whole = torch.cat([part.data for part in parts])
            for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = place


def project(x: Tensor, *layers: nn.Module) -> list[Tensor] | tuple[Tensor, ...]:
    """x (..., D) -> what each layer makes of it."""
    if torch.is_inference_mode_enabled() and all(map(_plain, layers)):
        weight = as_one([layer.weight for layer in layers])
        bias = None if layers[0].bias is None else as_one([layer.bias for layer in layers])
        if weight is not None and (bias is None) == (layers[0].bias is None):
            return F.linear(x, weight, bias).split([layer.out_features for layer in layers], -1)
    return [layer(x) for layer in layers]


def as_one(parts: list[Tensor]) -> Tensor | None:
    """Tensors that lie side by side as one, over their first dimension; None where they don't."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or part.stride() != first.stride():
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _plain(layer: nn.Module) -> bool:
    """Whether all that a layer does is its product: an adapter does more, and a hook waits for its call."""
    return type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
