"""Files: which ones a path means, and their text, decompressed and decoded, from any byte on.

Text is UTF-8, with or without a byte order mark. A byte that is not UTF-8 and a NUL byte (UTF-16, or no text at all)
are refused with their offset, which is that in the decompressed text of a `.gz`, `.bz2`, `.xz` or `.zst`.
"""

import bz2
import codecs
import glob
import gzip
import importlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import UserError

CHUNK = 1 << 20  # bytes that are read at a time


class Piece(NamedTuple):
    """What is read at one go. Bytes of a text file: the documents that begin there. Rows of a table."""

    file: str | None  # None: the reader carries its own text
    begin: int = 0
    end: int | None = None  # None: to the end of the file
    n_bytes: int = 0  # of the file (tables: of the text): for sharing out work, and to see that a file has changed
    split: str | None = None  # the split that its documents belong to, where the source fixes that


def files(path: str | list[str] | None, word: str = "data.path") -> list[Path]:
    """The files that `path` means, sorted, each once: a file, every file below a folder, a glob, or a list of those.

    They keep the names that the user gave: a link is known by its own name, not by that of what it leads to. Hidden
    files and folders are passed over. Raises `UserError` if a path matches nothing, a folder on the way cannot be read,
    a link leads nowhere or a file is empty.
    """
    if not path:
        raise UserError(f"{word} is not set: give a file, a folder, a glob such as 'books/*.txt', or a list of them")
    found: dict[str, str] = {}  # by what it leads to
    for one in [path] if isinstance(path, str | Path) else path:
        here = Path(one).expanduser().absolute()
        try:
            if here.is_dir():
                matches = list(_below(str(here), os.path.realpath(here), set()))
            else:
                named = [here] if here.exists() else _matches(here)
                matches = [(os.path.realpath(match), str(match)) for match in named if _is_file(match)]
        except OSError as error:
            raise UserError(f"{word}: {Path(error.filename)} cannot be read: {error.strerror}") from error
        if not matches:
            raise UserError(f"{word}={one} matches no file (the current folder is {Path.cwd()})")
        for target, match in matches:
            found.setdefault(target, match)
    for file in found.values():
        if stat(file).st_size == 0:
            raise UserError(f"{word}: {file} is empty: remove it or leave it out")
    return list(map(Path, found.values()))


def _matches(pattern: Path) -> list[Path]:
    """What a glob matches, sorted; unlike `glob`, it doesn't pass over a folder on the way that cannot be read."""
    for part in (pattern, *pattern.parents):
        if glob.has_magic(str(part.parent)) or glob.has_magic(part.name):
            for folder in glob.glob(f"{part.parent}{os.sep}", recursive=True):
                _check_readable(folder)
    return sorted(map(Path, glob.glob(str(pattern), recursive=True)))


def _check_readable(folder: str) -> None:
    """Raise `OSError` where a folder's names cannot be listed, or what they stand for not be looked at."""
    os.scandir(folder).close()
    os.stat(os.path.join(folder, os.curdir))


def _below(folder: str, target: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    """(what it leads to, path) of every file below a folder, which leads to `target`; links to folders are followed."""
    if target in seen:
        return
    seen.add(target)
    _check_readable(folder)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=attrgetter("name")):
            if entry.name.startswith("."):
                continue
            inner = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(target, entry.name)
            if entry.is_dir():
                yield from _below(entry.path, inner, seen)
            elif _is_file(entry.path):
                yield inner, entry.path


def _is_file(path: str | Path) -> bool:
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path} is a link that leads nowhere: mend it or leave it out")
    return os.path.isfile(path)


def stat(file: str | Path) -> os.stat_result:
    """What the system says of a file, which may be gone since it was listed."""
    try:
        return os.stat(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def imported(module: str):
    """A library that not every user needs, which is imported when a file or a source does."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{module} is missing to read this data: pip install 'lmzoo[data]'") from None


def _open_zst(file: Path) -> BinaryIO:
    return io.BufferedReader(imported("pyarrow").input_stream(str(file), compression="zstd"))


class Streams(io.RawIOBase):
    """The text of a `.bz2` or `.xz`, which may be several streams one after the other, with zeros behind them.

    `bz2.open` and `lzma.open` take a stream whose head is damaged for the end of the file; here it is an error.
    """

    def __init__(self, file: Path, decompressor: Callable):
        self._file, self._decompressor, self._current = file.open("rb"), decompressor, decompressor()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:
        while True:
            raw = b""
            if self._current.eof:
                raw = self._current.unused_data.lstrip(b"\0")
                while not raw and (more := self._file.read(CHUNK)):
                    raw = more.lstrip(b"\0")
                if not raw:
                    return 0
                self._current = self._decompressor()
            elif self._current.needs_input and not (raw := self._file.read(CHUNK)):
                raise EOFError("its end is missing")
            if text := self._current.decompress(raw, len(buffer)):
                buffer[:len(text)] = text
                return len(text)


def _open_bz2(file: Path) -> BinaryIO:
    return io.BufferedReader(Streams(file, bz2.BZ2Decompressor), CHUNK)


def _open_xz(file: Path) -> BinaryIO:
    return io.BufferedReader(Streams(file, lzma.LZMADecompressor), CHUNK)


COMPRESSED = {".gz": gzip.open, ".bz2": _open_bz2, ".xz": _open_xz, ".zst": _open_zst}


def _open(file: Path) -> BinaryIO:
    suffix = file.suffix.lower()
    return COMPRESSED[suffix](file) if suffix in COMPRESSED else file.open("rb")


@contextmanager
def opened(piece: Piece) -> Iterator[BinaryIO]:
    """The bytes of a piece's file. Whatever is wrong with it, or goes wrong with it meanwhile, is a `UserError`."""
    file = Path(piece.file)
    try:
        with _open(file) as stream:
            yield stream
        size = file.stat().st_size
    except FileNotFoundError as error:
        raise UserError(f"{file} changed while it was read: it is gone") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{file} cannot be read to its end: {error}") from error
    expected = piece.begin + piece.n_bytes
    if size < expected or piece.end is None and size > expected:
        raise UserError(f"{file} changed while it was read: it has {size:,} bytes now; start again once it is whole")


def lines(stream: BinaryIO, piece: Piece) -> Iterator[tuple[int, str]]:
    """(offset, line with its end) from the first line that begins in `piece` to the file's end: the caller stops."""
    return _decoded(stream, piece, lambda offset: stream.readline())


def blocks(stream: BinaryIO, piece: Piece) -> Iterator[tuple[int, str]]:
    """The same, many whole lines at a time as long as they begin in `piece`; a long line comes in several parts."""
    end = sys.maxsize if piece.end is None else piece.end

    def read(offset: int) -> bytes:
        raw = stream.read(max(0, min(CHUNK, end - offset)))
        return raw if raw.endswith(b"\n") else raw + stream.readline(CHUNK)

    return _decoded(stream, piece, read)


def _decoded(stream: BinaryIO, piece: Piece, read: Callable[[int], bytes]) -> Iterator[tuple[int, str]]:
    """What `read(offset)` yields, as text, from the first line that begins in `piece`."""
    offset = piece.begin
    if offset:  # a line begins here if the one before has ended
        stream.seek(offset - 1)
        offset -= 1
        skipped = b""
        while not skipped.endswith(b"\n"):
            skipped = stream.readline(CHUNK)
            offset += len(skipped)
            if not skipped or piece.end is not None and offset >= piece.end:
                return
    decode = codecs.getincrementaldecoder("utf-8" if offset else "utf-8-sig")().decode
    while True:
        raw = read(offset)
        try:
            text = decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            place = offset + len(raw) - len(error.object) + error.start
            raise UserError(f"{piece.file} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {place}; "
                            "convert it or leave it out") from error
        if not raw:
            return
        if "\0" in text:
            raise UserError(f"{piece.file} is not plain text: NUL byte at offset {offset + raw.index(0)} (UTF-16?); "
                            "convert it to UTF-8 or leave it out")
        yield offset, text
        offset += len(raw)


def line_number(piece: Piece, offset: int) -> int:
    """The number of the line at an offset, counted in a second reading."""
    with _open(Path(piece.file)) as stream:
        number = 1
        while offset > 0:
            line = stream.readline(CHUNK)
            offset -= len(line)
            number += line.endswith(b"\n")
        return number
