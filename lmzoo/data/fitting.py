"""Packing `fit`: whole documents in rows by best fit decreasing, planned once and kept beside the shards.

The longest document first, each goes into the fullest row that has room for it (Johnson et al. 1974). A document longer
than a row is cut into full rows and a rest. Documents of one length are placed together, and a group of rows has less
than half its room left each time it is filled: the work is that of the lengths, not of the documents.
"""

import io
import shutil
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .cache import replacing
from .shards import Split

BLOCK = 1 << 17  # documents that are packed together, so that memory does not grow with the corpus


class Fitted:
    """The spans of the stream that each row of a split holds, for rows of `length` tokens of which `stride` are inputs.

    Where a task reads ahead (length > stride), a span's last token is a target only and takes no room, and the spans of
    a cut document share it. Where the store's folder cannot be written to, the plan is kept in memory.
    """

    def __init__(self, split: Split, length: int, stride: int):
        self.made_of = split, length, stride
        file = split.folder / f"{split.name.replace('/', '-')}-fit-{length}-{stride}.plan"
        try:
            if (plan := opened(file)) is None:
                with replacing(file) as stream:
                    write_plan(stream, *self.made_of)
                plan = opened(file)
        except OSError:
            stream = io.BytesIO()
            write_plan(stream, *self.made_of)
            plan = np.frombuffer(stream.getbuffer(), "<i8")
        n_rows, self.n_inputs = plan[-2:].tolist()
        self._spans, self._first = plan[: -n_rows - 3].reshape(-1, 2), plan[-n_rows - 3 : -2]

    def __reduce__(self):  # a worker process maps the file anew instead of copying it
        return Fitted, self.made_of

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, row: int) -> list[list[int]]:
        """[begin, end] of each span of a row."""
        return self._spans[self._first[row] : self._first[row + 1]].tolist()


def opened(file: Path) -> np.ndarray | None:
    """A plan, memory-mapped; None if there is none that is whole."""
    size = file.stat().st_size // 8 if file.exists() else 0
    if size < 3:
        return None
    plan = np.frombuffer(np.memmap(file, "u1", "r", shape=8 * size), "<i8")
    n_spans, n_rows, _ = plan[-3:].tolist()
    return plan if size == 2 * n_spans + n_rows + 3 else None


def write_plan(stream: BinaryIO, split: Split, length: int, stride: int) -> None:
    """int64: (begin, end) of the spans, row after row; where in these each row begins; n_spans, n_rows, n_inputs."""
    begin = n_rows = n_spans = n_inputs = 0
    with tempfile.TemporaryFile() as first:
        for lengths in blocks(split.lengths(BLOCK)):
            spans = begin + cut(lengths, length, stride)
            sizes = np.diff(spans)[:, 0] - (length - stride)
            rows = best_fit(sizes, stride)
            stream.write(spans[np.argsort(rows, kind="stable")].astype("<i8").tobytes())
            counts = np.bincount(rows)
            first.write((n_spans + counts.cumsum() - counts).astype("<i8").tobytes())
            begin, n_rows = begin + int(lengths.sum()), n_rows + len(counts)
            n_spans, n_inputs = n_spans + len(spans), n_inputs + int(sizes.sum())
        first.seek(0)
        shutil.copyfileobj(first, stream)
    stream.write(np.array([n_spans, n_rows, n_inputs], "<i8").tobytes())


def blocks(lengths: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same numbers, `BLOCK` at a time, wherever one shard ends and the next begins."""
    waiting = np.empty(0, np.int64)
    for more in lengths:
        waiting = np.concatenate([waiting, more])
        while len(waiting) >= BLOCK:
            yield waiting[:BLOCK]
            waiting = waiting[BLOCK:]
    if len(waiting):
        yield waiting


def cut(lengths: np.ndarray, length: int, stride: int) -> np.ndarray:
    """(begin, end) of the spans (n, 2) of documents that follow each other: one each, but full rows of longer ones.

    A document without an input, as that of a single token is to a task that reads ahead, has none.
    """
    ends = lengths.cumsum()
    n_spans = np.maximum(-(-(lengths - (length - stride)) // stride), 0)
    number = np.arange(n_spans.sum()) - np.repeat(n_spans.cumsum() - n_spans, n_spans)  # within the document
    begins = np.repeat(ends - lengths, n_spans) + number * stride
    return np.stack([begins, np.minimum(begins + length, np.repeat(ends, n_spans))], 1)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The row (n,) of each item of 1 .. capacity, by best fit decreasing; rows are numbered by their first item."""
    row_of, n_rows = np.empty(len(sizes), np.int64), 0
    groups: dict[int, list[np.ndarray]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys of `groups`, sorted
    order = np.argsort(-sizes, kind="stable")
    for items in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1) if len(order) else ():
        size = int(sizes[items[0]])
        while len(items):
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms.pop(place)
                rows = np.concatenate(groups.pop(room))
            else:
                room, rows = capacity, np.arange(n_rows, n_rows + -(-len(items) // (capacity // size)))
                n_rows += len(rows)
            each = room // size  # after its first item a row is still the fullest with room for the next
            n_used = min(len(rows), -(-len(items) // each))
            placed = np.repeat(rows[:n_used], each)[: len(items)]
            row_of[items[: len(placed)]] = placed
            items = items[len(placed) :]
            in_last = len(placed) - each * (n_used - 1)
            for some, left in ((rows[n_used:], room), (rows[: n_used - 1], room - each * size),
                               (rows[n_used - 1 : n_used], room - in_last * size)):
                if len(some) and left:
                    if left not in groups:
                        insort(rooms, left)
                    groups.setdefault(left, []).append(some)
    _, first, row_of = np.unique(row_of, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[row_of]
