"""The memory of decoding: keys and values of the tokens that were already read, allocated once."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValues:
    """One layer's keys and values, (B, H_kv, max_len, K) each, filled from the left; or, for cross-attention, whole."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def append(self, keys: Tensor, values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Write ``keys`` and ``values`` (B, H_kv, T, K) behind the first ``offset``; return all that are filled."""
        end = offset + keys.shape[2]
        self.keys[:, :, offset:end], self.values[:, :, offset:end] = keys, values
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """What a model remembers between calls; made by ``model.cache(batch, max_len)``, passed in, never kept on a module.

    ``length``: columns filled. ``layers``: a KeyValues per layer. ``cross``: the memory's keys and values per layer,
    computed at the first step.
    """

    def __init__(self, layers: list[KeyValues], max_len: int):
        self.layers, self.max_len, self.length = layers, max_len, 0
        self.cross: list[KeyValues | None] = [None] * len(layers)
        self.keep: Tensor | None = None
        self.documents: Tensor | None = None

    def extend(self, batch: int, n_new: int, keep: Tensor | None, documents: Tensor | None):
        """Note ``n_new`` columns; return (keep, documents) over all columns, None where nobody ever gave any.

        Raises ValueError if the cache is too short.
        """
        length = self.length + n_new
        if length > self.max_len:
            raise ValueError(f"cache of max_len={self.max_len} is too short for {length} tokens")
        if keep is not None or self.keep is not None:
            old = keep.new_ones(batch, self.length) if self.keep is None else self.keep
            new = old.new_ones(batch, n_new) if keep is None else keep
            self.keep = torch.cat([old, new], 1)
        if documents is not None or self.documents is not None:
            old = documents[:, :1].expand(-1, self.length) if self.documents is None else self.documents
            new = old[:, -1:].expand(-1, n_new) if documents is None else documents
            self.documents = torch.cat([old, new], 1)
        return self.keep, self.documents
