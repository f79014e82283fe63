"""The token store: a folder of memory-mapped shards, so that opening one costs the same at any size.

A store holds up to three splits (train, val, test), of which val and test may be several sets by name (val/wiki). Each
is one long stream of tokens, documents one after the other as `bos t1 .. tn eos`. Between documents the stream is cut
into shards (`shardfile.py`), one for each part of the source that has documents of it, in the order of the source.

`meta.json`, written last, holds the names of all classes in order, and of each split's shards the counts, the classes
and the sha256 of what follows the header.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from zlib import crc32

import numpy as np

from ..errors import UserError
from ..tokenizer import Tokenizer
from .cache import replacing
from .labelled import names_in
from .shardfile import AGAIN, HEADER_SIZE, Shard

SPLITS = ("train", "val", "test")
UNTAGGED = -100  # what losses pass over


class Split:
    """One split of a store: its tokens and documents by their place in the stream, over all its shards.

    A shard is opened when something of it is first read. `n_tokens`, `n_documents`, `n_bytes` (UTF-8 of the raw text),
    `n_unlabelled` (documents without a label), `n_untagged` (words without a token, whose tag is lost), `labels` (the
    names of the classes or tags that occur, among all `names` of the store); `kind` (of label, see `labelled`).
    """

    def __init__(self, folder: Path, name: str, meta: dict):
        self.folder, self.name, self.tokenizer, self.has_words = folder, name, meta["tokenizer"], meta["words"]
        self.kind, self.names = meta["kind"], meta["labels"]
        self.shards: list[dict] = meta["splits"][name]
        self._tokens, self._documents = (list(accumulate((shard[count] for shard in self.shards), initial=0))
                                         for count in ("tokens", "documents"))
        self.n_tokens, self.n_documents = self._tokens[-1], self._documents[-1]
        self.n_bytes, self.n_unlabelled, self.n_untagged = (sum(shard[count] for shard in self.shards)
                                                            for count in ("bytes", "unlabelled", "untagged"))
        number = {label: place for place, label in enumerate(self.names)}
        self._classes = [[sorted(number[one] for one in names_in(label, self.kind)) for label in shard["labels"]]
                         for shard in self.shards]
        self.labels = [self.names[place] for place in sorted({*chain(*chain(*self._classes))})]
        self._opened: list[Shard | None] = [None] * len(self.shards)

    def __reduce__(self):  # a worker process maps the files anew instead of copying them
        return _split, (self.folder, self.name, self.names)

    def _shard(self, number: int) -> Shard:
        if self._opened[number] is None:
            self._opened[number] = open_shard(self.folder, self.shards[number], self.tokenizer)
        return self._opened[number]

    def _places(self, before: list[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(shard, begin, end) for each shard that holds some of begin..end; `before` counts what precedes each."""
        end = min(end, before[-1])
        number = bisect_right(before, begin) - 1
        while begin < end:
            stop = min(end, before[number + 1])
            if begin < stop:
                yield number, begin - before[number], stop - before[number]
            begin, number = stop, number + 1

    def _read(self, kind: str, dtype: type, begin: int, end: int) -> np.ndarray:
        found = [getattr(self._shard(shard), kind)[first:last] for shard, first, last in
                 self._places(self._tokens, begin, end)]
        return (found[0] if len(found) == 1 else np.concatenate([np.empty(0, dtype), *found])).astype(dtype)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin..end of the stream, int64 (end - begin,)."""
        return self._read("tokens", np.int64, begin, end)

    def word_starts(self, begin: int, end: int) -> np.ndarray:
        """Whether a word begins at each of the tokens begin..end, bool (end - begin,); only if `has_words`."""
        return self._read("words", np.bool_, begin, end)

    def written(self, begin: int, end: int) -> np.ndarray:
        """Whether the assistant says each of the tokens begin..end, bool (end - begin,); only of conversations."""
        return self._read("written", np.bool_, begin, end)

    def documents_at(self, begin: int, end: int) -> np.ndarray:
        """The document to which each of the tokens begin..end belongs, int64 (end - begin,)."""
        found = [np.empty(0, np.int64)]
        for shard, first, last in self._places(self._tokens, begin, end):
            ends = self._shard(shard).ends
            low, high = np.searchsorted(ends, [first, last - 1], side="right")
            inside = np.searchsorted(ends[low:high], np.arange(first, last), side="right")
            found.append(inside + (low + self._documents[shard]))
        return np.concatenate(found)

    def tags(self, begin: int, end: int) -> np.ndarray:
        """The index among the store's labels of the tag of each of the tokens begin..end, int64 (end - begin,);
        `UNTAGGED` where no word begins."""
        found = [np.array([*chain(*self._classes[shard]), UNTAGGED])[self._shard(shard).tags[first:last]]
                 for shard, first, last in self._places(self._tokens, begin, end)]
        return np.concatenate([np.empty(0, np.int64), *found])

    def label(self, document: int) -> int | list[int] | float | None:
        """A document's number, or the index of its class (a list: of all its classes) among the store's labels; None
        where it has none, and where labels are of another kind."""
        number, place, _ = next(self._places(self._documents, document, document + 1))
        shard = self._shard(number)
        if shard.labels[place] < 0 or self.kind in ("tags", "text", "turns"):
            return None
        if self.kind == "number":
            return float(shard.numbers[place])
        classes = self._classes[number][shard.labels[place]]
        return list(classes) if self.kind == "classes" else classes[0]

    def second(self, document: int) -> int:
        """How many of a document's tokens come before its second text; 0 if it has none."""
        number, place, _ = next(self._places(self._documents, document, document + 1))
        seconds = self._shard(number).seconds
        return int(seconds[place]) if len(seconds) else 0

    def span(self, document: int) -> tuple[int, int]:
        """Where a document begins and ends in the stream, bos and eos included."""
        shard, place, _ = next(self._places(self._documents, document, document + 1))
        ends, before = self._shard(shard).ends, self._tokens[shard]
        return before + (int(ends[place - 1]) if place else 0), before + int(ends[place])

    def lengths(self, at_a_time: int = 1 << 20) -> Iterator[np.ndarray]:
        """The lengths of all documents in tokens, in order, int64, some at a time."""
        for shard in range(len(self.shards)):
            ends = self._shard(shard).ends
            for begin in range(0, len(ends), at_a_time):
                yield np.diff(ends[begin:begin + at_a_time], prepend=ends[begin - 1] if begin else 0)


class Joined:
    """Splits of one store or of several, one after the other."""

    def __init__(self, splits: Sequence[Split]):
        self.splits = list(splits)
        self.n_tokens, self.n_documents, self.n_bytes, self.n_unlabelled, self.n_untagged = (
            sum(getattr(split, count) for split in self.splits)
            for count in ("n_tokens", "n_documents", "n_bytes", "n_unlabelled", "n_untagged"))
        self.labels = sorted({label for split in self.splits for label in split.labels})

    def read(self, begin: int, end: int) -> np.ndarray:
        """Tokens begin..end, int64, which lie in one store."""
        for split in self.splits:
            if begin < split.n_tokens:
                return split.read(begin, end)
            begin, end = begin - split.n_tokens, end - split.n_tokens
        return np.empty(0, np.int64)

    def span(self, document: int) -> tuple[int, int]:
        """Where a document begins and ends, bos and eos included."""
        before = 0
        for split in self.splits:
            if document < split.n_documents:
                begin, end = split.span(document)
                return before + begin, before + end
            before, document = before + split.n_tokens, document - split.n_documents
        raise IndexError(document)

    def lengths(self) -> Iterator[np.ndarray]:
        """The lengths of all documents in tokens, in order, some at a time."""
        return chain.from_iterable(split.lengths() for split in self.splits)


class Store:
    """A prepared corpus: `store["train"]`, `store.splits` (those that exist), `labels`, `xz_bits_per_byte`.

    `kind` says of which kind labels are (see `labelled`), `left_out` counts the documents and bytes that de-duplication
    dropped, `megabytes_per_second` says how fast the text was tokenised. Other `labels` that hold all of the store's
    give the classes other numbers.
    """

    def __init__(self, folder: str | Path, labels: list[str] | None = None):
        self.folder = Path(folder)
        meta = read_meta(self.folder / "meta.json")
        meta["labels"] = labels or meta["labels"]
        self.labels: list[str] | None = meta["labels"] or None
        self.kind: str | None = meta["kind"]
        self.xz_bits_per_byte: float | None = meta["xz_bits_per_byte"]
        self.left_out: dict[str, int] = meta["left_out"]
        self.megabytes_per_second: float | None = meta["megabytes_per_second"]
        self.tokenizer: str = meta["tokenizer"]
        self._sets = {name: Split(self.folder, name, meta) for name in meta["splits"]}

    def __getitem__(self, split: str) -> "Split | Joined":
        first, *others = self.sets(split).values()
        return Joined([first, *others]) if others else first

    def sets(self, split: str) -> dict[str | None, Split]:
        """The sets of a split by their names; None: the one that has no name of its own."""
        return {name.partition("/")[2] or None: found for name, found in self._sets.items()
                if name.partition("/")[0] == split}

    def __reduce__(self):
        return Store, (self.folder, self.labels)

    @property
    def name(self) -> str:
        """A hash of all that went in."""
        return self.folder.name

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if self.sets(split)]

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise `UserError` unless `tokenizer` is the one that made this store."""
        if self.tokenizer != tokenizer.hash:
            raise UserError(f"{self.folder} was made with tokenizer {self.tokenizer[:12]}, "
                            f"not with this one ({tokenizer.hash[:12]})")

    def verify(self, bodies: bool = True) -> None:
        """Raise `UserError` if a shard is not what was written: its header and, with `bodies`, every byte of it."""
        for split in self._sets.values():
            for told in split.shards:
                open_shard(self.folder, told, self.tokenizer, verify=bodies)


def _split(folder: Path, name: str, labels: list[str]) -> Split:
    return Store(folder, labels)._sets[name]


def open_shard(folder: Path, told: dict, tokenizer: str, verify: bool = False) -> Shard:
    """The shard of which a store, or the record of a part, has `told`; with `verify` every byte of it is compared."""
    file = folder / told["file"]
    shard = Shard(file, tokenizer, told["tokens"], told["documents"])
    if verify:
        with file.open("rb") as stream:
            stream.seek(HEADER_SIZE)
            if hashlib.file_digest(stream, "sha256").hexdigest() != told["sha256"]:
                raise UserError(f"{file} is damaged (sha256): {AGAIN}")
    return shard


def read_meta(file: Path) -> dict:
    """What `write_meta` wrote. Raises `UserError` if it was changed since, or is of another version."""
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
        told = meta.pop("checksum")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is not what lmzoo wrote: {AGAIN}") from error
    if told != _checksum(meta):
        raise UserError(f"{file} was changed by hand or is damaged: {AGAIN}")
    return meta


def _checksum(meta: dict) -> int:
    return crc32(json.dumps(meta, sort_keys=True).encode())


def write_meta(file: Path, meta: dict) -> None:
    """Make a folder of shards a store, or some shards a finished part: written last, whole or not at all."""
    with replacing(file) as stream:
        stream.write(json.dumps(meta | {"checksum": _checksum(meta)}, indent=1).encode())
