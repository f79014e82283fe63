"""Rows: what one example of a split is. The stream of tokens is cut into rows, or each document is one.

    documents    [b a a a e][b c c e][b d d d d d e]       b: bos, e: eos
    stream       [b a a a e b c][c e b d d d d][d e]       full rows; the last is shorter, never dropped
    isolate      the same rows; attention stays within the documents (0 0 0 0 0 1 1 ...)
    single       [b a a a e] [b c c e] [b d d d d d e]     padded by the collator; longer documents are cut
"""

import numpy as np

from ..errors import UserError
from .shards import Split

PACKINGS = ("stream", "isolate", "single")


class Rows:
    """The rows of a split: `length` tokens, `stride` apart. Stride None: a row is a document, cut before its eos."""

    def __init__(self, split: Split, packing: str, length: int, stride: int | None):
        if packing not in PACKINGS:
            raise UserError(f"data.packing={packing!r} is not one of {', '.join(PACKINGS)}")
        if stride is None and packing != "single":
            raise UserError(f"data.packing={packing} joins documents, but this task reads one document a row: "
                            "set data.packing=single")
        self.split, self.packing, self.length, self.stride = split, packing, length, stride

    def __len__(self) -> int:
        if self.packing == "single":
            return self.split.n_documents
        return 1 + max(0, -(-(self.split.n_tokens - self.length) // self.stride))

    @property
    def n_cut(self) -> int:
        """Tokens that no row holds: the ends of documents longer than a row. Only `single` cuts."""
        if self.packing != "single":
            return 0
        lengths = np.diff(self.split.ends, prepend=0)
        return int(np.maximum(lengths - self.length, 0).sum())

    def __getitem__(self, row: int) -> dict:
        """`tokens` int64 (n,), `document_ids` int32 (n,) from 0; if the store has them, `label` and `word_starts`."""
        split = self.split
        if self.packing == "single":
            begin, end = split.span(row)
            places = np.arange(begin, min(end, begin + self.length))
            if self.stride is None:
                places[-1] = end - 1
            tokens, document_ids = split.read(begin, end)[places - begin], np.zeros(len(places), np.int32)
        else:
            begin = row * self.stride
            end = min(begin + self.length, split.n_tokens)
            places = np.arange(begin, end)
            first, last = np.searchsorted(split.ends, [begin, end - 1], side="right")
            document_ids = np.searchsorted(split.ends[first:last], places, side="right").astype(np.int32)
            tokens = split.read(begin, end)
        example = {"tokens": tokens, "document_ids": document_ids}
        if self.packing == "single" and (label := split.label(row)) is not None:
            example["label"] = label
        if split.words is not None:
            example["word_starts"] = split.words[places].astype(bool)
        return example
