"""The token store: a folder of flat files that are memory-mapped, so that opening one costs the same at any size.

A store holds up to three splits (train, val, test). Each is one long stream of tokens, documents one after the other as
`bos t1 .. tn eos`, in five files:

    train.tokens   64 bytes of header (magic, version, bytes per token, tokenizer's hash, number of tokens), then tokens
    train.ends     int64 per document: where it ends in the stream
    train.bytes    int64 per document: UTF-8 bytes of its raw text, before any normalisation
    train.labels   int32 per document: its class, in the order in which classes first occur; -1 for none
    train.words    uint8 per token, 1 where a word begins (only where it was asked for)

`meta.json`, written last, holds the splits, the labels by name and their order, and the sha256 of every file.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..tokenizer import Tokenizer

MAGIC, VERSION = b"lmzoo\0tk", 1
HEADER = struct.Struct("<8sII32sQ8x")  # magic, version, bytes per token, tokenizer, number of tokens
SPLITS = ("train", "val", "test")
FILES = {"ends": np.dtype("<i8"), "bytes": np.dtype("<i8"), "labels": np.dtype("<i4"), "words": np.dtype("u1")}


def width_for(vocab_size: int) -> int:
    """The bytes that a token id takes: 2 up to 65,536 ids, else 4."""
    return 2 if vocab_size <= 1 << 16 else 4


class Split:
    """One split of a store. `ends` (n_documents,) is memory-mapped; tokens are read by their place in the stream.

    `classes` turns a class as the file has it into its index among the store's labels.
    """

    def __init__(self, folder: Path, name: str, classes: list[int]):
        self.folder, self.name, self.classes = Path(folder), name, classes
        file = self.folder / f"{name}.tokens"
        with file.open("rb") as stream:
            header = stream.read(HEADER.size)
        if len(header) < HEADER.size or header[:8] != MAGIC:
            raise UserError(f"{file} is not a token file of lmzoo: delete the folder, it is prepared again")
        _, version, width, tokenizer, self.n_tokens = HEADER.unpack(header)
        if version != VERSION:
            raise UserError(f"{file} has version {version}, this lmzoo reads version {VERSION}")
        if file.stat().st_size != HEADER.size + width * self.n_tokens:
            raise UserError(f"{file} should hold {self.n_tokens} tokens of {width} bytes but has another size: "
                            "delete the folder, it is prepared again")
        self.tokenizer = tokenizer.hex()
        self._tokens = np.memmap(file, f"<u{width}", "r", HEADER.size, (self.n_tokens,))
        self.ends, self._bytes, self._labels = (self._map(kind) for kind in ("ends", "bytes", "labels"))
        self.words = self._map("words") if (self.folder / f"{name}.words").exists() else None
        self.n_documents = len(self.ends)

    def _map(self, kind: str) -> np.ndarray:
        return np.memmap(self.folder / f"{self.name}.{kind}", FILES[kind], "r")

    def __reduce__(self):  # a worker process maps the files anew instead of copying them
        return Split, (self.folder, self.name, self.classes)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the raw text of all documents."""
        return int(self._bytes.sum())

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin..end of the stream, int64 (end - begin,)."""
        return self._tokens[begin:end].astype(np.int64)

    @property
    def n_unlabelled(self) -> int:
        """Documents without a class."""
        return int((self._labels < 0).sum())

    def label(self, document: int) -> int | None:
        """The index of a document's class among the store's labels, or None."""
        label = int(self._labels[document])
        return None if label < 0 else self.classes[label]

    def span(self, document: int) -> tuple[int, int]:
        """Where a document begins and ends in the stream, bos and eos included."""
        return int(self.ends[document - 1]) if document else 0, int(self.ends[document])


class Store:
    """A prepared corpus: `store["train"]`, `store.splits` (the names that exist), `labels`, `xz_bits_per_byte`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        self.labels: list[str] | None = meta["labels"] or None
        self.xz_bits_per_byte: float | None = meta["xz_bits_per_byte"]
        self.tokenizer: str = meta["tokenizer"]
        self._sha256: dict[str, str] = meta["sha256"]
        self._splits = {name: Split(self.folder, name, meta["classes"]) for name in meta["splits"]}

    def __getitem__(self, split: str) -> Split:
        return self._splits[split]

    def __reduce__(self):
        return Store, (self.folder,)

    @property
    def splits(self) -> list[str]:
        return list(self._splits)

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise `UserError` unless `tokenizer` is the one that made every token of this store."""
        for split in self._splits.values():
            if split.tokenizer != tokenizer.hash:
                raise UserError(f"{self.folder} was made with tokenizer {split.tokenizer[:12]}, "
                                f"not with this one ({tokenizer.hash[:12]})")

    def verify(self) -> None:
        """Read every file and raise `UserError` if one is not what was written."""
        for name, expected in self._sha256.items():
            if _sha256(self.folder / name) != expected:
                raise UserError(f"{self.folder / name} is damaged (sha256): delete the folder, it is prepared again")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Writer:
    """Writes a store into `folder`, going on where an earlier writer's last `commit` left it.

    `done` documents of the source have been committed; whoever feeds the writer passes over that many.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, words: bool = False):
        self.folder, self.tokenizer, self.words = folder, tokenizer, words
        self.width = width_for(len(tokenizer))
        folder.mkdir(parents=True, exist_ok=True)
        progress = folder / "progress.json"
        state = json.loads(progress.read_text(encoding="utf-8")) if progress.exists() else {}
        self.done: int = state.get("done", 0)
        self.labels: list[str] = state.get("labels", [])
        self.counts: dict[str, dict[str, int]] = state.get("splits", {})
        self._files = {}
        for split in list(self.counts):
            self._open(split)

    def _open(self, split: str) -> None:
        """Open the files of a split and cut what was written after the last commit."""
        counts = self.counts.setdefault(split, {"documents": 0, "tokens": 0})
        sizes = {kind: dtype.itemsize * counts["documents"] for kind, dtype in FILES.items()}
        sizes |= {"tokens": HEADER.size + self.width * counts["tokens"], "words": counts["tokens"]}
        for kind, size in sizes.items():
            if kind != "words" or self.words:
                file = (self.folder / f"{split}.{kind}").open("ab")
                file.truncate(size)
                self._files[split, kind] = file

    def add(self, split: str, encoded: Iterable[tuple[list[int], list[bool] | None]], texts: list[str],
            labels: list[str | None]) -> None:
        """Append documents: ids (without bos and eos) and, where words are kept, whether a word begins at each."""
        if not texts:
            return
        if split not in self.counts:
            self._open(split)
        opening, closing = self.tokenizer.bos is not None, self.tokenizer.eos is not None
        tokens, words, lengths = [], [], []
        for ids, starts in encoded:
            document = self.tokenizer.document(ids)
            tokens += document
            lengths.append(len(document))
            if self.words:
                words += [True] * opening + starts + [True] * closing
        counts = self.counts[split]
        self._append(split, "tokens", np.array(tokens, dtype=f"<u{self.width}"))
        self._append(split, "ends", counts["tokens"] + np.cumsum(lengths))
        self._append(split, "bytes", [len(text.encode()) for text in texts])
        self._append(split, "labels", [self._label(label) for label in labels])
        if self.words:
            self._append(split, "words", words)
        counts["tokens"] += len(tokens)
        counts["documents"] += len(texts)

    def _append(self, split: str, kind: str, values) -> None:
        self._files[split, kind].write(np.asarray(values, dtype=FILES.get(kind)).tobytes())

    def _label(self, label: str | None) -> int:
        if label is None:
            return -1
        if label not in self.labels:
            self.labels.append(label)
        return self.labels.index(label)

    def commit(self, done: int) -> None:
        """Keep what was added so far: the source's first `done` documents need not be tokenised again."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.done = done
        write_whole(self.folder / "progress.json",
                    json.dumps({"done": done, "labels": self.labels, "splits": self.counts}))

    def finish(self, labels: list[str] | None, xz_bits_per_byte: float | None) -> None:
        """Write the headers and, last, `meta.json`. Classes are numbered as in `labels`, or by their sorted names."""
        names = labels or sorted(self.labels)
        for file in self._files.values():
            file.close()
        splits = [split for split in SPLITS if split in self.counts]
        for split in splits:
            header = HEADER.pack(MAGIC, VERSION, self.width, bytes.fromhex(self.tokenizer.hash),
                                 self.counts[split]["tokens"])
            with (self.folder / f"{split}.tokens").open("r+b") as stream:
                stream.write(header)
                stream.flush()
                os.fsync(stream.fileno())
        meta = {"tokenizer": self.tokenizer.hash, "splits": splits, "xz_bits_per_byte": xz_bits_per_byte,
                "labels": names, "classes": [names.index(label) for label in self.labels],
                "sha256": {f"{split}.{kind}": _sha256(self.folder / f"{split}.{kind}") for split, kind in self._files}}
        write_whole(self.folder / "meta.json", json.dumps(meta, indent=1))
        (self.folder / "progress.json").unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old one or the new one."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
