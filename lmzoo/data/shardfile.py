"""One shard: the documents that one part of a source gives to one split, in a flat file that is memory-mapped.

    train-00003.shard  64 bytes of header (see `Header`), then
        tokens         uint16 or uint32, documents one after the other as `bos t1 .. tn eos`; then zeros up to 8 bytes
        ends           int64 per document: where it ends among the shard's tokens
        bytes          int64 per document: UTF-8 bytes of its raw text, before any normalisation
        numbers        float64 per document: its label, nan for none
        labels         int32 per document: its class, or its set of them, in the order in which they first occur here;
                       of other labels 0; -1 for none
        seconds        int32 per document `bos a eos b eos`: how many tokens come before b; 0 where there is no b
        tags           int16 per token: that of the word whose first piece it is, numbered as classes are; else -1
        written        uint8 per token of a conversation (which gets no bos and eos), 1 where the assistant says it
        words          uint8 per token, 1 where a word begins

The last five but labels are there only where the task asked for them.
"""

import hashlib
import math
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
from .labelled import SEPARATOR, Document

MAGIC, VERSION = b"lmzoo\0tk", 3
HEADER = struct.Struct("<8sHBB32sQQ")  # the fields of `Header`; a crc32 of them follows
HEADER_SIZE = HEADER.size + 4
SECTIONS = {  # what follows the tokens: type, of what each has a value, and the flag of shards that have it (0: all)
    "ends": ("<i8", "documents", 0), "bytes": ("<i8", "documents", 0), "numbers": ("<f8", "documents", 4),
    "labels": ("<i4", "documents", 0), "seconds": ("<i4", "documents", 2), "tags": ("<i2", "tokens", 8),
    "written": ("u1", "tokens", 16), "words": ("u1", "tokens", 1),
}  # fmt: skip
OF_KIND = {  # the sections that documents with a kind of label have
    None: (), "class": ("seconds",), "classes": ("seconds",), "number": ("seconds", "numbers"), "tags": ("tags",),
    "text": ("seconds",), "turns": ("written",),
}  # fmt: skip
MOST_TAGS = 1 << 15
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
        kinds = {"tokens": (f"<u{self.width}", self.n_tokens), "padding": ("u1", padding)}
        counts = {"tokens": self.n_tokens, "documents": self.n_documents}
        kinds |= {name: (dtype, 0 if flag and not self.flags & flag else counts[of])
                  for name, (dtype, of, flag) in SECTIONS.items()}
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
        raise UserError(f"{file} has version {header.version}, this lmzoo reads version {VERSION}: {AGAIN}")
    if start != header.packed():
        raise UserError(f"{file} is damaged (header): {AGAIN}")
    if size != HEADER_SIZE + sum(dtype.itemsize * count for dtype, count in header.sections().values()):
        raise UserError(f"{file} should hold {header.n_tokens} tokens but has another size: {AGAIN}")
    return header


class ShardWriter:
    """Writes one shard, some documents at a time; `close` puts the whole file in its place. `words`: say where words
    begin; `kind`: of label."""

    def __init__(self, file: Path, tokenizer: Tokenizer, words: bool, kind: str | None = None):
        self.file, self.tokenizer, self.kind = file, tokenizer, kind
        around = (None, None) if kind == "turns" else (tokenizer.bos, tokenizer.eos)
        self.opening, self.closing = ([id for id in (id,) if id is not None] for id in around)
        kept = (*OF_KIND[kind], *(["words"] if words else []))
        kinds = {name: (dtype, flag) for name, (dtype, _, flag) in SECTIONS.items() if not flag or name in kept}
        self.width, self.flags = width_for(len(tokenizer)), sum(flag for _, flag in kinds.values())
        self.n_tokens = self.n_documents = self.n_bytes = self.n_unlabelled = self.n_untagged = 0
        self.labels: dict[str, int] = {}
        self.inside, self.n_bytes_inside = False, 0  # a document that goes on
        self._sha256 = hashlib.sha256()
        self._stream = file.with_name(f"{file.name}.{os.getpid()}").open("wb")
        self._stream.write(bytes(HEADER_SIZE))
        self._later = {name: (dtype, tempfile.TemporaryFile(dir=file.parent)) for name, (dtype, _) in kinds.items()}
        self._outside = {"words": True, "tags": -1, "written": 0}.get(list(kinds)[-1])  # what is kept of bos and eos

    def add(self, encoded: Iterable[tuple[list[int], list | None]], documents: Iterable[Document]) -> None:
        """Append documents: of each of their texts, in turn, the ids (without bos and eos) and what is kept of each id:
        whether a word begins there, or the assistant says it, or the number of the word that has its first piece there,
        else -1.

        A document with `more` is the beginning or middle of one, with which the next goes on.
        """
        tokens, kept, ends, sizes, classes, seconds, numbers = array("I"), [], [], [], [], [], []
        encoded = iter(encoded)
        for document in documents:
            text, label, _, more, other, *_ = document
            ids, of_each = next(encoded)
            runs = [([] if self.inside else self.opening, None), (ids, of_each), ([] if more else self.closing, None)]
            self.n_bytes_inside += len(text.encode())
            second = 0
            if other is not None:
                second = sum(len(ids) for ids, _ in runs)
                runs += [next(encoded), (self.closing, None)]
                self.n_bytes_inside += len(other.encode())
            for ids, _ in runs:
                tokens.fromlist(ids)
            if self.kind == "tags":
                runs[1] = ids, self._tags(of_each, document)
            for ids, of_each in runs if self._outside is not None else ():
                kept += of_each or [self._outside] * len(ids)
            self.inside = more
            if not more:
                ends.append(self.n_tokens + len(tokens))
                sizes.append(self.n_bytes_inside)
                self.n_bytes_inside = 0
                classes.append(-1 if label is None and self.kind is None else self._class(document))
                if self.kind:
                    seconds.append(second)
                    numbers.append(label if self.kind == "number" and label is not None else math.nan)
        self._write(np.asarray(tokens).astype(f"<u{self.width}").tobytes())
        values = {"ends": ends, "bytes": sizes, "labels": classes, "seconds": seconds, "numbers": numbers,
                  "tags": kept, "written": kept, "words": kept}
        for name, (dtype, stream) in self._later.items():
            stream.write(np.asarray(values[name], dtype).tobytes())
        self.n_tokens += len(tokens)
        self.n_documents += len(ends)
        self.n_bytes += sum(sizes)
        self.n_unlabelled += classes.count(-1)

    def _class(self, document: Document) -> int:
        """The number of its class or set of classes; 0 for any other label, -1 for none."""
        label = {"text": document.second, "turns": document.messages}.get(self.kind, document.label)
        if label is None:
            return -1
        if self.kind in (None, "class"):
            return self._number(label)
        return self._number(SEPARATOR.join(sorted(set(label)))) if self.kind == "classes" else 0

    def _number(self, name: str) -> int:
        return self.labels.setdefault(name, len(self.labels))

    def _tags(self, words: list[int], document: Document) -> list[int]:
        """The number of each token's tag, -1 for none."""
        self.n_untagged += len(document.label) - len(words) + words.count(-1)
        found = [-1 if word < 0 else self._number(document.label[word]) for word in words]
        if len(self.labels) > MOST_TAGS:
            raise UserError(f"there are more than {MOST_TAGS:,} tags: is data.tags_column the column of the tags?")
        return found

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
                "unlabelled": self.n_unlabelled, "untagged": self.n_untagged, "labels": list(self.labels),
                "sha256": self._sha256.hexdigest()}
