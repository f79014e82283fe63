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
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Hidden files and folders are passed over. Raises `UserError` if a path matches nothing or a file is empty.
    """
    if not path:
        raise UserError(f"{word} is not set: give a file, a folder, a glob such as 'books/*.txt', or a list of them")
    found: dict[Path, None] = {}
    for one in [path] if isinstance(path, str | Path) else path:
        here = Path(one).expanduser()
        if here.is_dir():
            matches = [file for file in here.rglob("*") if _visible(file.relative_to(here))]
        elif here.exists():
            matches = [here]
        else:
            matches = [Path(match) for match in glob.glob(str(here), recursive=True)]
        matches = sorted(match.resolve() for match in matches if match.is_file())
        if not matches:
            raise UserError(f"{word}={one} matches no file (the current folder is {Path.cwd()})")
        found.update(dict.fromkeys(matches))
    for file in found:
        if file.stat().st_size == 0:
            raise UserError(f"{word}: {file} is empty: remove it or leave it out")
    return list(found)


def _visible(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def imported(module: str):
    """A library that not every user needs, which is imported when a file or a source does."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{module} is missing to read this data: pip install 'lmzoo[data]'") from None


def _open_zst(file: Path) -> BinaryIO:
    return io.BufferedReader(imported("pyarrow").input_stream(str(file), compression="zstd"))


COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}


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


