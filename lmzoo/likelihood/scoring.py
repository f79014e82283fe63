"""The log-probabilities of tokens where they stand: rows of unequal length in batches, each as if it were alone.

Rows are read in windows of a few batches, sorted by length within them, so that memory does not grow with their number.
A net's logits are taken to fp32 first, and the head runs at the tokens that are asked for, nowhere else.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..blocks.loss import IGNORED, log_probabilities
from ..decoding import evaluating

BATCHES = 32  # whose rows are sorted by length together


class Row(NamedTuple):
    """What a net reads at once: `ids`, and for each position the token that is asked for there, or -100.

    `source`: what the encoder of an encoder-decoder reads (`ids` then are its decoder's). `key` is the caller's.
    """

    ids: Sequence[int]
    labels: Sequence[int]
    source: Sequence[int] = ()
    key: Hashable = None


class Scored(NamedTuple):
    """Of the tokens that a row asks for, in order: their log-probabilities (n,) in float64, and whether each is the
    likeliest (n,)."""

    key: Hashable
    log_probabilities: Tensor
    likeliest: Tensor


def score(net: nn.Module, rows: Iterable[Row], batch_size: int) -> Iterator[Scored]:
    """Each of the `rows`, in their order; `batch_size` of them are read together."""
    rows = iter(rows)
    while window := list(islice(rows, BATCHES * batch_size)):
        order = sorted(range(len(window)), key=lambda i: len(window[i].ids) + len(window[i].source))
        found: dict[int, Scored] = {}
        with evaluating(net):
            for begin in range(0, len(order), batch_size):
                places = order[begin : begin + batch_size]
                found |= zip(places, read(net, [window[i] for i in places]), strict=True)
        yield from (found[i] for i in range(len(window)))


def read(net: nn.Module, rows: Sequence[Row]) -> Iterator[Scored]:
    """The same of one batch."""
    device = next(net.parameters()).device
    (ids, mask), (labels, _) = (padded([getattr(row, side) for row in rows], fill, device)
                                for side, fill in (("ids", 0), ("labels", IGNORED)))  # fmt: skip
    asked = labels != IGNORED

    def readout(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return log_probabilities(head, hidden[asked], labels[asked])

    if net.family == "encoder-decoder":
        found = net(*padded([row.source for row in rows], 0, device), ids, mask, readout=readout)
    else:
        found = net(ids, mask, readout=readout)
    each = (part.cpu().split(asked.sum(1).tolist()) for part in found)
    return (Scored(row.key, *parts) for row, *parts in zip(rows, *each, strict=True))


def padded(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows filled up on the right (B, T), and the mask of what is kept, None where that is all."""
    length = max(map(len, rows))
    filled = torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = (torch.arange(length, device=device) < lengths[:, None]).long()
    return filled, None if mask.all() else mask
