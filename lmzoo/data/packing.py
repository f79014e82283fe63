"""Rows: what one example of a split is. The stream of tokens is cut into rows, or each document is one, or part of one.

    documents    [b a a a e][b c c e][b d d d d d e]       b: bos, e: eos
    stream       [b a a a e b c][c e b d d d d][d e]       full rows; the last is shorter, never dropped
    isolate      the same rows; attention stays within the documents (0 0 0 0 0 1 1 ...)
    fit          [b d d d d d e][b a a a e] [b c c e]      whole documents, as many as fit; attention as in isolate
    single       [b a a a e] [b c c e] [b d d d d d e]     padded by the collator; longer documents are cut

Of two texts, [b a a a e a a e], the longer one is cut first, and each keeps its eos. A conversation is cut at its end.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..errors import UserError
from .fitting import Fitted
from .sampler import Alike, Shuffled
from .shards import Joined, Split

PACKINGS = ("stream", "isolate", "fit", "single")


class Rows:
    """The rows of a split: `length` tokens, `stride` apart. Stride None: a row is a document, cut before its eos."""

    def __init__(self, split: Split, packing: str, length: int, stride: int | None):
        if packing not in PACKINGS:
            raise UserError(f"data.packing={packing!r} is not one of {', '.join(PACKINGS)}")
        if stride is None and packing != "single":
            raise UserError(f"data.packing={packing} joins documents, but this task reads one document a row: "
                            "set data.packing=single")
        if split.kind and length < 3:
            raise UserError(f"data.row_length={length} is too short for a document with a label: give 3 or more")
        self.split, self.packing, self.length, self.stride = split, packing, length, stride
        self.ahead = length - stride if stride else 0  # tokens at a row's end that are read as targets only
        self.fitted = Fitted(split, length, stride) if packing == "fit" else None

    @property
    def sources(self) -> dict[str | None, "Rows"]:
        """The rows of each source of a mixture; of a corpus by itself, these."""
        return {None: self}

    @property
    def unequal(self) -> bool:
        """Whether rows are documents, and so of many lengths."""
        return self.stride is None

    def order(self, seed: int, by_length: bool) -> Shuffled:
        """Which rows a step of training reads; `by_length`: if rows are of many, those of like length share a step."""
        return Alike(len(self), seed, self.lengths) if by_length and self.unequal else Shuffled(len(self), seed)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens each of some rows (n,) holds, int64, where rows are documents."""
        spans = np.array([self.split.span(row) for row in rows.tolist()], np.int64).reshape(-1, 2)
        return np.minimum(np.diff(spans)[:, 0], self.length)

    def __len__(self) -> int:
        if self.packing == "single":
            return self.split.n_documents
        if self.fitted:
            return len(self.fitted)
        return 1 + max(0, -(-(self.split.n_tokens - self.length) // self.stride))

    @cached_property
    def _cut(self) -> tuple[int, int]:
        """(tokens that no row holds, documents that they are the ends of), read once. Only `single` cuts."""
        n_tokens = n_documents = 0
        for lengths in self.split.lengths() if self.packing == "single" else ():
            beyond = np.maximum(lengths - self.length, 0)
            n_tokens, n_documents = n_tokens + int(beyond.sum()), n_documents + np.count_nonzero(beyond)
        return n_tokens, n_documents

    @property
    def n_cut(self) -> int:
        """Tokens that no row holds: the ends of documents longer than a row."""
        return self._cut[0]

    @property
    def n_too_long(self) -> int:
        """Documents longer than a row, where a row is a document."""
        return self._cut[1]

    @property
    def n_inputs(self) -> int:
        """Tokens that rows read as inputs, over all rows."""
        if self.fitted:
            return self.fitted.n_inputs
        return self.split.n_tokens - self.n_cut - self.ahead * (len(self) if self.packing == "single" else 1)

    @property
    def tokens_per_row(self) -> float:
        """Inputs of a row: of a full one, or where rows are of many lengths on average."""
        return self.n_inputs / len(self) if self.packing in ("fit", "single") else self.stride

    @property
    def n_padding(self) -> int:
        """Positions of rows of full length that hold no token."""
        return len(self) * (self.length - self.ahead) - self.n_inputs

    def __getitem__(self, row: int) -> dict:
        """`tokens` int64 (n,), `document_ids` int32 (n,) from 0; if the store has them, `word_starts`, and of a single
        document `label`, `tags` int64 (n,), `written` bool (n,) and `second`, how many tokens come before its second
        text."""
        split, second = self.split, 0
        if self.fitted:
            spans = self.fitted[row]
        elif self.packing == "single":
            begin, end = split.span(row)
            second = split.second(row)
            if second:
                halves = self._halves(second, end - begin)
                spans = [*cut_before_end(begin, begin + second, halves[0]),
                         *cut_before_end(begin + second, end, halves[1])]
                second = halves[0]
            elif self.stride is None and end - begin > self.length and split.kind != "turns":
                spans = cut_before_end(begin, end, self.length)
            else:
                spans = [(begin, min(end, begin + self.length))]
        else:
            begin = row * self.stride
            spans = [(begin, min(begin + self.length, split.n_tokens))]
        example = {"tokens": _joined(split.read, spans)}
        if self.packing == "single":
            example["document_ids"] = np.zeros(len(example["tokens"]), np.int32)
            if (label := split.label(row)) is not None:
                example["label"] = label
            if second:
                example["second"] = second
            if split.kind == "turns":
                example["written"] = _joined(split.written, spans)
            if split.kind == "tags":
                example["tags"] = _joined(split.tags, spans)
        elif self.fitted:
            lengths = [end - begin for begin, end in spans]
            example["document_ids"] = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)
        else:
            documents = split.documents_at(*spans[0])
            example["document_ids"] = (documents - documents[0]).astype(np.int32)
        if split.has_words:
            example["word_starts"] = _joined(split.word_starts, spans)
        return example

    def _halves(self, second: int, n: int) -> tuple[int, int]:
        """How many tokens of each of two texts of `second` and of n tokens together a row holds: as many of both (not
        counting bos), unless one is shorter."""
        first = 1 + min(second - 1, max(self.length - 1 - (n - second), self.length // 2))
        return first, min(n - second, self.length - first)


class JoinedRows:
    """The rows of several sets of documents, numbered one set after the other; `sources` holds those of each.

    `weights` says in which proportion they are read: once each.
    """

    def __init__(self, sets: Mapping[str | None, Split], packing: str, length: int, stride: int | None):
        self.split, self.packing, self.length = Joined(list(sets.values())), packing, length
        self.sources = {name: Rows(split, packing, length, stride) for name, split in sets.items()}
        self._rows = list(self.sources.values())
        self._starts = list(accumulate(map(len, self._rows), initial=0))
        self.weights = list(map(len, self._rows))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict:
        source = bisect_right(self._starts, row) - 1
        return self._rows[source][row - self._starts[source]]

    @property
    def n_cut(self) -> int:
        return sum(rows.n_cut for rows in self._rows)

    @property
    def n_too_long(self) -> int:
        return sum(rows.n_too_long for rows in self._rows)

    @property
    def n_inputs(self) -> int:
        return sum(rows.n_inputs for rows in self._rows)

    @property
    def n_padding(self) -> int:
        return sum(rows.n_padding for rows in self._rows)


def cut_before_end(begin: int, end: int, length: int) -> list[tuple[int, int]]:
    """The spans of `length` tokens of begin..end, of which the last is kept."""
    return [(begin, begin + length - 1), (end - 1, end)] if end - begin > length else [(begin, end)]


def _joined(read, spans) -> np.ndarray:
    parts = [read(begin, end) for begin, end in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
