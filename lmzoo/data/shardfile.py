"""One shard: the documents that one part of a source gives to one split, in a flat file that is memory-mapped.

    train-00003.shard  64 bytes of header (see `Header`), then
        tokens         uint16 or uint32, documents one after the other as `bos t1 .. tn eos`; then zeros up to 8 bytes
        ends           int64 per document: where it ends among the shard's tokens
        bytes          int64 per document: UTF-8 bytes of its raw text, before any normalisation
        labels         int32 per document: its class, in the order in which classes first occur here; -1 for none
        words          uint8 per token, 1 where a word begins (only where it was asked for)
"""

import hashlib
import os
import struct
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from ..errors import UserError
from ..tokenizer import Tokenizer

MAGIC, VERSION = b"lmzoo\0tk", 2
HEADER = struct.Struct("<8sHBB32sQQ")  # the fields of `Header`; a crc32 of them follows
HEADER_SIZE = HEADER.size + 4
WORDS = 1  # the flag of a shard that says where words begin
AGAIN = "delete the folder, it is prepared again"


def width_for(vocab_size: int) -> int:
    """The bytes that a token id takes: 2 up to 65,536 ids, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


class Header(NamedTuple):
    """What the first 64 bytes of a shard say."""

    magic: bytes
    version: int
    width: int
    flags: int
    tokenizer: bytes
    n_tokens: int
    n_documents: int

    def packed(self) -> bytes:
        fields = HEADER.pack(*self)
        return fields + crc32(fields).to_bytes(4, "little")

    def sections(self) -> dict[str, tuple[np.dtype, int]]:
        """The type and number of the values of each section, in the order of the file."""
        padding = -self.n_tokens * self.width % 8
        kinds = {"tokens": (f"<u{self.width}", self.n_tokens), "padding": ("u1", padding),
                 "ends": ("<i8", self.n_documents), "bytes": ("<i8", self.n_documents),
                 "labels": ("<i4", self.n_documents), "words": ("u1", self.n_tokens * (self.flags & WORDS))}
        return {kind: (np.dtype(dtype), count) for kind, (dtype, count) in kinds.items()}


class Shard:
    """The sections of one file as memory-mapped arrays. Raises `UserError` if the header isn't that of `tokenizer`'s
    shard with these counts; the rest of the file is not read."""

    def __init__(self, file: Path, tokenizer: str, n_tokens: int, n_documents: int):
        header = read_header(file)
        if header.tokenizer.hex() != tokenizer:
            raise UserError(f"{file} was made with another tokenizer than the store it lies in: {AGAIN}")
        if (header.n_tokens, header.n_documents) != (n_tokens, n_documents):
            raise UserError(f"{file} is not the shard that meta.json beside it speaks of: {AGAIN}")
        mapped, offset = np.memmap(file, "u1", "r"), HEADER_SIZE
        for kind, (dtype, count) in header.sections().items():
            setattr(self, kind, np.frombuffer(mapped, dtype, count, offset))
            offset += dtype.itemsize * count


def read_header(file: Path) -> Header:
    """The header of a shard. Raises `UserError` if it is damaged or the file hasn't the size that it says."""
    try:
        with file.open("rb") as stream:
            start, size = stream.read(HEADER_SIZE), os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {AGAIN}") from error
    if len(start) < HEADER_SIZE or not start.startswith(MAGIC):
        raise UserError(f"{file} is not a shard of lmzoo: {AGAIN}")
    header = Header(*HEADER.unpack(start[:HEADER.size]))
    if header.version != VERSION:
        raise UserError(f"{file} has version {header.version}, this lmzoo reads version {VERSION}: take another "
                        "data.cache_dir")
    if start != header.packed():
        raise UserError(f"{file} is damaged (header): {AGAIN}")
    if size != HEADER_SIZE + sum(dtype.itemsize * count for dtype, count in header.sections().values()):
        raise UserError(f"{file} should hold {header.n_tokens} tokens but has another size: {AGAIN}")
    return header


class ShardWriter:
    """Writes one shard, some documents at a time; `close` puts the whole file in its place."""

    def __init__(self, file: Path, tokenizer: Tokenizer, words: bool):
        self.file, self.tokenizer = file, tokenizer
        self.opening, self.closing = ([id for id in (id,) if id is not None] for id in (tokenizer.bos, tokenizer.eos))
        self.width, self.flags = width_for(len(tokenizer)), WORDS * words
        self.n_tokens = self.n_documents = self.n_bytes = self.n_unlabelled = 0
        self.labels: dict[str, int] = {}
        self.inside, self.n_bytes_inside = False, 0  # a document that goes on
        self._sha256 = hashlib.sha256()
        self._stream = file.with_name(f"{file.name}.{os.getpid()}").open("wb")
        self._stream.write(bytes(HEADER_SIZE))
        kinds = {"ends": "<i8", "bytes": "<i8", "labels": "<i4"} | ({"words": "u1"} if words else {})
        self._later = {kind: (dtype, tempfile.TemporaryFile(dir=file.parent)) for kind, dtype in kinds.items()}

    def add(self, encoded: Iterable[tuple[list[int], list[bool] | None]], texts: list[str], labels: list[str | None],
            more: list[bool]) -> None:
        """Append texts: ids (without bos and eos) and, where words are kept, whether a word begins at each. A text with
        `more` is the document's beginning or middle, and the next text given goes on with it."""
        tokens, words, ends, sizes, classes = array("I"), [], [], [], []
        for (ids, starts), text, label, goes_on in zip(encoded, texts, labels, more, strict=True):
            opening, closing = [] if self.inside else self.opening, [] if goes_on else self.closing
            for some in (opening, ids, closing):
                tokens.fromlist(some)
            if self.flags & WORDS:
                words += [True] * len(opening) + starts + [True] * len(closing)
            self.inside = goes_on
            self.n_bytes_inside += len(text.encode())
            if not goes_on:
                ends.append(self.n_tokens + len(tokens))
                sizes.append(self.n_bytes_inside)
                classes.append(-1 if label is None else self.labels.setdefault(label, len(self.labels)))
                self.n_bytes_inside = 0
        self._write(np.asarray(tokens).astype(f"<u{self.width}").tobytes())
        for (dtype, stream), values in zip(self._later.values(), (ends, sizes, classes, words), strict=False):
            stream.write(np.asarray(values, dtype).tobytes())
        self.n_tokens += len(tokens)
        self.n_documents += len(ends)
        self.n_bytes += sum(sizes)
        self.n_unlabelled += classes.count(-1)

    def _write(self, content: bytes) -> None:
        self._stream.write(content)
        self._sha256.update(content)

    def close(self) -> dict:
        """Finish the file; what `meta.json` says of it."""
        header = Header(MAGIC, VERSION, self.width, self.flags, bytes.fromhex(self.tokenizer.hash), self.n_tokens,
                        self.n_documents)
        self._write(bytes(header.sections()["padding"][1]))
        for _, stream in self._later.values():
            stream.seek(0)
            while content := stream.read(1 << 20):
                self._write(content)
            stream.close()
        self._stream.seek(0)
        self._stream.write(header.packed())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._stream.name, self.file)
        return {"file": self.file.name, "tokens": self.n_tokens, "documents": self.n_documents, "bytes": self.n_bytes,
                "unlabelled": self.n_unlabelled, "labels": list(self.labels), "sha256": self._sha256.hexdigest()}
