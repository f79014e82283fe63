"""Exact de-duplication in constant memory: of equal texts the first in the order of the source is kept.

Each part of the source writes the digests of its documents (`write`). They are dealt out into buckets on disk, by their
value, so that equal ones meet in a bucket that fits into memory; there all but the first are marked (`mark`).
"""

import hashlib
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..errors import UserError
from .cache import replacing
from .labelled import Document
from .shardfile import AGAIN

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
ENTRY = np.dtype([*((name, DIGEST[name]) for name in DIGEST.names), ("document", "<i8")])
BUCKET_MB, MOST_BUCKETS = 32, 500
AT_A_TIME = 1 << 18


def digests(documents: Iterable[tuple[str, Document]]) -> Iterator[bytes]:
    """16 bytes for each document: a hash of its text, over all its parts, or of both its texts."""
    digest = hashlib.blake2b(digest_size=DIGEST.itemsize)
    for _, document in documents:
        digest.update(document.content.encode())
        if not document.more:
            yield digest.digest()
            digest = hashlib.blake2b(digest_size=DIGEST.itemsize)


def write(file: Path, documents: Iterable[tuple[str, Document]]) -> None:
    """Put a file of digests in its place, whole: first that of all of these, then one for each document."""
    of_all = hashlib.blake2b(digest_size=DIGEST.itemsize)
    with replacing(file) as stream:
        stream.write(bytes(DIGEST.itemsize))
        for digest in digests(documents):
            stream.write(digest)
            of_all.update(digest)
        stream.seek(0)
        stream.write(of_all.digest())


def verify(file: Path) -> None:
    """Raise `UserError` if a file of digests is not what was written."""
    with file.open("rb") as stream:
        told = stream.read(DIGEST.itemsize)
        if told != hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST.itemsize)).digest():
            raise UserError(f"{file} is damaged: {AGAIN}")


def count(file: Path) -> int:
    """How many documents a file of digests is of."""
    return file.stat().st_size // DIGEST.itemsize - 1


def mark(files: list[Path], target: Path) -> None:
    """Write `target`: a byte for each document of the files of digests, in turn, 1 if no earlier text equals it."""
    n_documents = sum(map(count, files))
    n_buckets = min(max(1, math.ceil(n_documents * ENTRY.itemsize / (BUCKET_MB * 1e6))), MOST_BUCKETS)
    with ExitStack() as stack:
        stream = stack.enter_context(replacing(target))
        stream.truncate(n_documents)
        first = np.memmap(stream, "u1", "r+") if n_documents else np.empty(0, "u1")
        first[:] = 1
        buckets = [stack.enter_context(tempfile.TemporaryFile(dir=target.parent)) for _ in range(n_buckets)]
        for entries in _entries(files):
            bucket_of = entries["high"] % n_buckets
            for number in np.unique(bucket_of).tolist():
                buckets[number].write(entries[bucket_of == number].tobytes())
        for bucket in buckets:
            bucket.seek(0)
            entries = np.frombuffer(bucket.read(), ENTRY)
            entries = entries[np.lexsort((entries["document"], entries["low"], entries["high"]))]
            same = (entries["low"][1:] == entries["low"][:-1]) & (entries["high"][1:] == entries["high"][:-1])
            first[entries["document"][1:][same]] = 0
        del first  # some systems replace no file that is mapped


def _entries(files: list[Path]) -> Iterator[np.ndarray]:
    document = 0
    for file in files:
        with file.open("rb") as stream:
            stream.seek(DIGEST.itemsize)
            while content := stream.read(AT_A_TIME * DIGEST.itemsize):
                found = np.frombuffer(content, DIGEST)
                entries = np.empty(len(found), ENTRY)
                entries["high"], entries["low"] = found["high"], found["low"]
                entries["document"] = np.arange(document, document + len(found))
                document += len(found)
                yield entries


def without(documents: Iterable[tuple[str, Document]], first: np.ndarray | None,
            left_out: dict[str, int]) -> Iterator[tuple[str, Document]]:
    """The documents that are marked as the first of their text (None: all); `left_out` counts the others."""
    number = 0
    for name, document in documents:
        if first is None or first[number]:
            yield name, document
        else:
            left_out["documents"] += not document.more
            left_out["bytes"] += document.n_bytes
        number += not document.more
