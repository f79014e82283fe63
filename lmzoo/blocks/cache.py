"""The memory of decoding: keys and values of the tokens that were already read, allocated once.

Attention reads the filled part only, a view: a step costs as much as there is to see, and copies nothing. A layer with
a window has a ring, whose memory is the window's however long the rows become:

    window 4, columns 0 to 5 read:    slot  0  1  2  3
                                      column 4  5  2  3      the next one goes where column 2 stands
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValues:
    """One layer's keys and values, (B, H_kv, max_len, K) each, filled from the left; or, for cross-attention, whole."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values

    def append(self, keys: Tensor, values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Write ``keys`` and ``values`` (B, H_kv, T, K) behind the first ``offset``; return all that are to be seen.

        There may be fewer rows than there is room for: the first ones are meant.
        """
        end = offset + keys.shape[2]
        return self._write(self.keys, keys, offset, end), self._write(self.values, values, offset, end)

    def _write(self, store: Tensor, new: Tensor, offset: int, end: int) -> Tensor:
        n_rows = new.shape[0]
        store[:n_rows, :, offset:end] = new
        return store[:n_rows, :, :end]

    def select(self, rows: Tensor, n_filled: int) -> None:
        """Let the i-th row hold what row ``rows[i]`` holds, in place."""
        for store in (self.keys, self.values):
            store[: len(rows), :, :n_filled] = store[rows, :, :n_filled]


class Ring(KeyValues):
    """The keys and values of the last ``window`` columns: column c stands in slot c mod window."""

    def _write(self, store: Tensor, new: Tensor, offset: int, end: int) -> Tensor:
        window, n_new = store.shape[2], new.shape[2]
        if end <= window:
            return super()._write(store, new, offset, end)
        store = store[: len(new)]
        if n_new == 1:
            store[:, :, offset % window] = new[:, :, 0]
            return store
        columns = ring_columns(window, offset, end, store.device)
        seen = torch.cat([store[:, :, columns[:-n_new] % window], new], 2)
        store[:, :, columns[-window:] % window] = seen[:, :, -window:]
        return seen


def ring_columns(window: int, offset: int, end: int, device: torch.device | None = None) -> Tensor:
    """Which columns a ring hands out, in its order, when those from ``offset`` to ``end`` > window are written."""
    if end - offset == 1:
        return offset - (offset - torch.arange(window, device=device)) % window
    return torch.arange(max(0, offset - window + 1), end, device=device)


class Cache:
    """What a model remembers between calls; made by ``model.cache(batch, max_len)``, passed in, never kept on a module.

    ``length``: columns filled. ``layers``: a KeyValues per layer. ``cross``: the memory's keys and values per layer,
    computed at the first step. ``keep``, ``documents``: of all columns, None as long as nobody gave any.
    """

    def __init__(self, layers: list[KeyValues], max_len: int):
        self.layers, self.max_len, self.length = layers, max_len, 0
        self.cross: list[KeyValues | None] = [None] * len(layers)
        self.keep: Tensor | None = None
        self.documents: Tensor | None = None
        self.padded_behind = False  # whether a row ends with padding

    def extend(self, batch: int, n_new: int, keep: Tensor | None, documents: Tensor | None):
        """Note ``n_new`` columns; return (keep, documents) over all columns, None where nobody ever gave any.

        Raises ValueError if the cache is too short, and for padding between the tokens of a row that has a ring: its
        slots would go to padding.
        """
        length = self.length + n_new
        if length > self.max_len:
            raise ValueError(f"cache of max_len={self.max_len} is too short for {length} tokens")
        if keep is not None:
            self.keep = keep.new_ones(batch, self.max_len) if self.keep is None else self.keep
            self.keep[:, self.length : length] = keep
        if any(isinstance(layer, Ring) for layer in self.layers) and self.keep is not None:
            self._check_gaps(length, given=keep is not None)
        if documents is not None and self.documents is None:
            self.documents = documents[:, :1].repeat(1, self.max_len)
        if self.documents is not None:
            before = self.documents[:, self.length - 1 : self.length]
            self.documents[:, self.length : length] = before if documents is None else documents
        keep, documents = self.keep, self.documents
        return None if keep is None else keep[:, :length], None if documents is None else documents[:, :length]

    def _check_gaps(self, length: int, given: bool) -> None:
        gap = self.padded_behind and not given
        if given:
            kept = self.keep[:, :length].long()
            gap = bool(((kept.diff(dim=1) == 1).sum(1) + kept[:, 0] > 1).any())
            self.padded_behind = bool((kept.any(1) & (kept[:, -1] == 0)).any())
        if gap:
            raise ValueError("with windows a cache takes padding at the left only: move it there")

    def spread(self, n: int) -> None:
        """Let each row go on as ``n`` rows side by side; the layers must have room for them."""
        for layer in self.layers:
            rows = torch.arange(len(layer.keys) // n, device=layer.keys.device).repeat_interleave(n)
            layer.select(rows, self.length)
        self.cross = [
            KeyValues(memory.keys.repeat_interleave(n, 0), memory.values.repeat_interleave(n, 0))
            for memory in self.cross
            if memory is not None
        ] or self.cross
        self.keep = None if self.keep is None else self.keep.repeat_interleave(n, 0)
        self.documents = None if self.documents is None else self.documents.repeat_interleave(n, 0)

    def reorder(self, rows: Tensor) -> None:
        """Let the i-th row go on from ``rows[i]``, one that was spread from the same: its memory and padding stay."""
        for layer in self.layers:
            layer.select(rows, self.length)
