"""Sources: what a `data` node reads, in which order, in which parts, and into which split each document goes."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError
from ..literal import plain
from .cache import cache_dir, key, locked, replacing
from .labelled import Columns, Document
from .opening import Piece, files, stat
from .shards import SPLITS

FORMAT = 5  # of stores and of what the readers yield: raise it when either changes
HASHED_MB = 64  # corpora up to this size are recognised by their content, larger ones by their files' sizes and times
PART_MB, PARTS = (16, 512), 64  # a part is a 64th of the source, but no smaller or larger than this
PATHS = {"path": "train", "val_path": "val", "test_path": "test"}
PYTHON = [platform.python_version(), sys.base_prefix]  # what the text of a reader without a path depends on


class Unit(NamedTuple):
    """A piece that is read at one go, the word that named its path, and its files as [path, size, mtime, ctime]."""

    word: str
    piece: Piece
    files: list[list]


def fraction_of(text: str, use: bytes = b"split") -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6, person=use).digest()) / (1 << 48)


def state(file: str | Path) -> list:
    """What changes whenever a file does: its path, size and times (nobody can set back the last)."""
    found = stat(file)
    return [str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


@cache
def _sha256(file: str, *_) -> str:
    """The hash of the content of a file in a `state`: tokenizer and store both ask for it."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _paths(config: Mapping) -> Iterator[tuple[str, str | list[str] | None]]:
    """(word, path) of all that is read, a set that has a name as `val_path.NAME`."""
    for word in PATHS:
        if isinstance(config[word], Mapping):
            yield from ((f"{word}.{name}", path) for name, path in sorted(config[word].items()))
        elif config[word] or word == "path":
            yield word, config[word]


class Source:
    """The documents of a `data` node, with labels of a `kind` (see `labelled`) where the task wants some. Raises
    `UserError` if a path matches nothing."""

    def __init__(self, config: Mapping, kind: str | None = None):
        from hydra.utils import instantiate

        self.config = {word: plain(config.get(word)) for word in (*PATHS, "reader", "val_fraction")} | {"kind": kind}
        self.paths = dict(_paths(self.config))
        self.cache = cache_dir(config)
        self.reader = instantiate(self.config["reader"])
        if kind and isinstance(self.reader, Columns):
            self.reader = replace(self.reader, kind=kind)

    @cached_property
    def units(self) -> list[Unit]:
        """Every piece of `path`, `val_path` and `test_path`, in order."""
        return [unit for word in self.paths for unit in self._units(word)]

    def _units(self, word: str) -> list[Unit]:
        path = self.paths[word]
        found = [state(file) for file in files(path, f"data.{word}")] if path else []
        if not hasattr(self.reader, "pieces"):  # a function: all at one go
            return [Unit(word, Piece(None, n_bytes=sum(size for _, size, *_ in found)), found)]
        known = {file[0]: file for file in found}
        return [Unit(word, piece, [known.get(piece.file) or state(piece.file)] if piece.file else [])
                for piece in self.reader.pieces(path)]

    @property
    def title(self) -> str:
        """What the user calls it."""
        name = self.config["reader"].get("name")
        return f"data.name={name}" if name and not self.config["path"] else f"data.path={self.config['path']}"

    @property
    def n_bytes(self) -> int:
        """About how much text there is."""
        return sum(unit.piece.n_bytes for unit in self.units)

    def identity(self) -> dict:
        """What the documents depend on, as plain types."""
        return {"format": FORMAT, **{word: self.config[word] for word in ("reader", "val_fraction", "kind")},
                **{word: self._fingerprints(word) for word in {**PATHS, **self.paths}}}

    def _fingerprints(self, word: str) -> list:
        found = {file[0]: file for unit in self.units if unit.word == word for file in unit.files}
        if not found:
            return PYTHON if word == "path" else []
        if sum(size for _, size, *_ in found.values()) > HASHED_MB * 1e6:
            return list(found.values())
        try:
            return [[Path(file).name, _sha256(*of_file)] for file, of_file in found.items()]
        except OSError as error:
            raise UserError(f"data.{word}: {error.filename} cannot be read: {error.strerror}") from error

    def parts(self) -> list[list[Unit]]:
        """The units in parts, which one process works off at a time: a function of the source alone."""
        smallest, largest = PART_MB
        target = min(max(self.n_bytes / PARTS, smallest * 1e6), largest * 1e6)
        found, size = [[]], 0
        for unit in self.units:
            if size >= target:
                found.append([])
                size = 0
            found[-1].append(unit)
            size += unit.piece.n_bytes
        return found

    def read(self, unit: Unit) -> Iterator[Document]:
        """The documents of a unit. Raises `UserError` if a file of it isn't what it was when the units were listed."""
        if hasattr(self.reader, "pieces"):
            yield from self.reader.read(unit.piece)
        elif self.paths[unit.word]:
            yield from self.reader(self.paths[unit.word])
        else:
            yield from self._carried()
        for file in unit.files:
            if not Path(file[0]).exists() or state(file[0]) != file:
                raise UserError(f"{file[0]} changed while it was being read: run again")

    def _carried(self) -> Iterator[Document]:
        """What a reader yields without a path is kept in the cache: it is slow to parse."""
        kept = self.cache / "corpora" / f"{key(FORMAT, self.config['reader'], PYTHON)}.jsonl"
        if not kept.exists():
            with locked(kept):
                if not kept.exists():
                    with replacing(kept) as stream:
                        stream.writelines(f"{json.dumps(document)}\n".encode() for document in self.reader(None))
        with kept.open(encoding="utf-8") as stream:
            for line in stream:  # where a tuple has become a list
                yield Document(*(tuple(one) if isinstance(one, list) else one for one in json.loads(line)))

    def documents(self, units: Iterable[Unit] | None = None, split: str | None = None,
                  held_out: float | None = None) -> Iterator[tuple[str, Document]]:
        """(split, document) in the order of the source: each document in the split it belongs to.

        That is the split its source gives it; else that of the path it came from (`path`, `val_path`, `test_path`; of a
        set that has a name "val/NAME"); and without a `val_path`, a hash of its text or texts (of its first part)
        below `held_out` sends it to "val".
        Some of what a source has as its own "train" may be held out too, if it has nothing as "val".
        With `split`, all documents of `path` are of that split, but for those that their source gives to another.
        """
        if held_out is None:
            held_out = self.held_out(split)
        for unit in self.units if units is None else units:
            if split and unit.word != "path":
                continue
            name = None  # the split of a document that goes on
            for document in self.read(unit):
                name = name or self._split(unit, document, split, held_out)
                if not split or name == split:
                    yield name, document
                name = name if document.more else None
            if name:
                raise UserError(f"{unit.piece.file or 'the reader'}: the last document is said to go on")

    def _split(self, unit: Unit, document: Document, split: str | None, held_out: float) -> str:
        if unit.word != "path":
            word, _, name = unit.word.partition(".")
            return f"{PATHS[word]}/{name}" if name else PATHS[word]
        if document.split not in (None, *SPLITS):
            raise UserError("the source gives a text the split "
                            f"{document.split!r}: it must be {', '.join(SPLITS)} or none")
        given = document.split if split else self._given(unit, document)
        return given or split or ("val" if held_out and fraction_of(document.content) < held_out else "train")

    def held_out(self, split: str | None = None) -> float:
        """The hash below which a document is for validation: `val_fraction`, or more if it takes more to have one."""
        fraction = self.config["val_fraction"]
        if not split:
            self._check_apart()
        if not 0 <= fraction < 1:
            raise UserError(f"data.val_fraction={fraction} is not in [0, 1)")
        if not fraction or split or self.config["val_path"] or self._has_validation():
            return 0.0
        smallest, n, inside = 1.0, 0, False
        for unit, document in ((one, found) for one in self.units if one.word == "path" for found in self.read(one)):
            if not inside:
                n += 1
                smallest = min(smallest, fraction_of(document.content))
                if smallest < fraction or self._given(unit, document):
                    return fraction
            inside = document.more
        if n < 2:
            raise UserError(f"{self.title} holds {n} document{'s' * (n != 1)}, so none can be held out for "
                            "validation: set data.val_path, or data.val_fraction=0, or a finer data.reader.split")
        return max(fraction, smallest + 2**-48)

    def _given(self, unit: Unit, document: Document) -> str | None:
        """The split that the source gives a document, but for the "train" of a whole piece or of a column."""
        of_all = unit.piece.split == "train" or document.split == "train" and self.column
        return None if of_all else document.split

    @property
    def column(self) -> str | None:
        """The column that says which split a row is of."""
        return getattr(self.reader, "split_column", None)

    def _has_validation(self) -> bool:
        """Whether the source says of something that it is for validation."""
        texts = (document for unit in self.units if unit.word == "path" for document in self.read(unit))
        return any(unit.piece.split == "val" for unit in self.units) or bool(
            self.column and any(document.split == "val" for document in texts))

    def _check_apart(self) -> None:
        """Raise `UserError` if a file of `val_path` or `test_path` is one of `path`, too."""
        trained_on = {os.path.realpath(file[0]) for unit in self.units if unit.word == "path" for file in unit.files}
        for unit in self.units:
            for file, *_ in unit.files:
                if unit.word != "path" and os.path.realpath(file) in trained_on:
                    raise UserError(f"data.{unit.word}: {file} is in data.path too, so it would be trained on: "
                                    "leave it out of one of them")

    def sample(self, megabytes: float) -> Iterator[str]:
        """Training texts, about `megabytes` of them from all over the source: a hash of the text decides which."""
        share = megabytes * 1e6 / max(1, self.n_bytes)
        for split, document in self.documents():
            if split == "train" and fraction_of(document.content, b"sample") < share:
                yield from document.texts

    def held_out_texts(self) -> Iterator[str]:
        """Validation texts, in the order of the source."""
        units = [unit for unit in self.units if unit.word.startswith("val_path")] or None
        return (text for split, document in self.documents(units) if split.startswith("val") for text in document.texts)
