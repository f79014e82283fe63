"""Readers: files become a stream of documents, in constant memory, however long a file, a line or a document is.

A reader says into which pieces a source falls (`pieces(path)`, cheap) and reads one of them (`read(piece)`), so that
several processes can share a large file; the documents of the pieces, in order, are those of the source. `path` is what
the user typed: a file, a folder, a glob, or a list of those (None for a reader that carries its own text). To add a
source, write such a class, or a function `reader(path) -> Iterator[Document]`, and a `conf/data/x.yaml`.
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Literal

from ..errors import UserError, few
from .labelled import Columns, Document
from .opening import COMPRESSED, Piece, blocks, files, line_number, lines, opened, stat

PIECE_MB = 16  # of an uncompressed file that are read at one go
LINE = re.compile(".*\n|.+")
LINES = re.compile(rf"(?:[^\S\n]*\S.*\n)+|{LINE.pattern}")  # as many as follow each other without a blank one
LONGEST = 500_000  # characters: a longer text comes in parts of about that length


class Reader:
    """What all readers share: called with a path they yield all its documents, one piece after the other."""

    def __call__(self, path: str | list[str] | None) -> Iterator[Document]:
        return chain.from_iterable(map(self.read, self.pieces(path)))


# --- text: long ones in parts

def _cuts(text: str, length: int) -> Iterator[int]:
    """Where the parts of the first `length` characters end, but for the last: before white space, if there is any."""
    begin = 0
    while length - begin > LONGEST:
        part = text[begin : begin + LONGEST]
        words = re.match(r".*\S(?= )", part, re.DOTALL) or re.match(r".*\S(?=\s)", part, re.DOTALL)
        begin += words.end() if words else LONGEST
        yield begin


def in_parts(document: Document) -> Iterator[Document]:
    """A document that is in memory, in parts if it is longer than `LONGEST`, which none of two texts or of words is."""
    whole = {"two texts": document.second is not None, "words": document.words, "messages": document.messages}
    what = next((name for name, there in whole.items() if there), None)
    if what and (n := sum(map(len, document.texts))) > LONGEST:
        raise ValueError(f"its {what} hold {n:,} characters, more than the "
                         f"{LONGEST:,} that are read at once: shorten them, or leave the row out")
    begin = 0
    for end in _cuts(document.text, len(document.text)):
        yield document._replace(text=document.text[begin:end], more=True)
        begin = end
    yield document._replace(text=document.text[begin:]) if begin else document


def stripped(fragments: Iterable[str], file: str) -> Iterator[Document]:
    """The document that the fragments make, without white space at its ends, in parts; none if it is all white space.

    Only about `LONGEST` characters are held, and as many of white space, which may prove to be at the end.
    """
    held, n, spaces = [], 0, 0
    for fragment in fragments:
        fragment = fragment if held else fragment.lstrip()
        if not fragment:
            continue
        held.append(fragment)
        n += len(fragment)
        spaces = spaces + len(fragment) if fragment.isspace() else 0
        if spaces > LONGEST:
            raise UserError(f"{file} has more than {LONGEST:,} characters of white space at one place")
        if n > LONGEST and not spaces:
            text, begin = "".join(held), 0
            for end in _cuts(text, len(text.rstrip())):
                yield Document(text[begin:end], more=True)
                begin = end
            held, n = [text[begin:]], len(text) - begin
    if held:
        yield Document("".join(held).rstrip())


# --- readers

class TextFiles(Reader):
    """Files of text, a large one in pieces by byte offset. A subclass reads the documents of one piece."""

    splittable = True

    def pieces(self, path: str | list[str] | None) -> list[Piece]:
        found = []
        for file in files(path):
            size = stat(file).st_size
            step = round(PIECE_MB * 1e6) if self.splittable and file.suffix.lower() not in COMPRESSED else size
            found += [Piece(str(file), begin, begin + step, step) for begin in range(0, size - step, step)]
            begin = (size - 1) // step * step
            found.append(Piece(str(file), begin, None, size - begin))
        return found

    def read(self, piece: Piece) -> Iterator[Document]:
        with opened(piece) as stream:
            empty = piece.begin == 0 and piece.end is None
            for document in self.documents(stream, piece):
                empty = False
                yield document
            if empty:
                raise UserError(f"{piece.file} holds no documents: remove it or leave it out")


@dataclass(frozen=True)
class Text(TextFiles):
    """Plain text. `split` says what a document is: a whole "file", what stands between "blank" lines, or a "line".

    White space at the ends of a document is left out, and what is all white space is no document.
    """

    split: Literal["file", "blank", "line"] = "blank"

    @property
    def splittable(self) -> bool:
        return self.split != "file"

    def documents(self, stream: BinaryIO, piece: Piece) -> Iterator[Document]:
        for _, fragments in groupby(self._numbered(stream, piece), itemgetter(0)):
            yield from stripped(map(itemgetter(1), fragments), piece.file)

    def _numbered(self, stream: BinaryIO, piece: Piece) -> Iterator[tuple[int, str]]:
        """(number of the document, fragment of it). Between blank lines the last of these that comes before a document
        says whose it is: the piece in which that line begins."""
        end = sys.maxsize if piece.end is None else piece.end
        number, ended, owned = 0, True, piece.begin == 0 or self.split == "line"
        for offset, block in blocks(stream, piece):
            for text in (LINE if self.split == "line" else LINES).findall(block):
                if ended:
                    blank, last = True, offset >= end
                    if last and (self.split == "line" or not owned):
                        return
                ended = text.endswith("\n")
                blank = blank and text.isspace()
                if owned:
                    yield number, text
                if ended and (self.split == "line" or self.split == "blank" and blank):
                    if last:
                        return
                    number, owned = number + 1, True


@dataclass(frozen=True)
class Jsonl(Columns, TextFiles):
    """JSON lines: one object a line, which needs its own memory; blank lines are passed over.

    `field` holds the text ("text" if not given), `label_column` the label, and so on as in `Columns`; "a.b" looks into
    nested objects. null or "" is no label. An empty text is a document (but for a task that wants labels); an escaped
    NUL is a character.
    """

    field: str | None = None
    label_column: str | None = None
    text_word = "field"

    def documents(self, stream: BinaryIO, piece: Piece) -> Iterator[Document]:
        for offset, line in lines(stream, piece):
            if piece.end is not None and offset >= piece.end:
                return
            if not line.strip():
                continue
            try:
                yield from in_parts(self._document(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{piece.file} line {line_number(piece, offset)}: {error}") from error

    def _document(self, line: str) -> Document:
        record = json_object(line)
        row = {word: _field(record, name, word) for word, name in self.columns.items()}
        if not self.asked:
            row["label_column"] = record.get("label")
        return self.document(row)


def json_object(line: str) -> dict:
    """The object that a line of JSON is; ValueError for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object but a {type(found).__name__}")
    return found


def _field(record: dict, name: str, word: str):
    """The value of a key, or of a path of keys with dots between them."""
    value = record
    for key in [name] if name in record else name.split("."):
        if not isinstance(value, dict) or key not in value:
            found = few(value) if isinstance(value, dict) else "none"
            raise ValueError(f"no field data.{word}={name}; the fields are {found}")
        value = value[key]
    return value


@dataclass(frozen=True)
class Csv(Columns, TextFiles):
    """CSV whose first line names the columns; a file that ends in .tsv is split at tabs. A row needs its own memory.

    The columns are those of `Columns`. An empty cell is no label (or no class of several), or a document of no text,
    but for a task that wants labels. Blank lines are passed over.
    """

    text_column: str | None = None
    label_column: str | None = None
    delimiter: str = ","
    splittable = False  # a quoted cell may hold line breaks

    def pieces(self, path: str | list[str] | None) -> list[Piece]:
        if len(self.delimiter) != 1 or self.delimiter in '\r\n"':
            raise UserError(f"data.reader.delimiter={self.delimiter!r} is not a single character; where it is a tab, "
                            "call the file .tsv")
        return super().pieces(path)

    def documents(self, stream: BinaryIO, piece: Piece) -> Iterator[Document]:
        rows = self._rows(stream, piece)
        _, names = next(rows, (1, []))
        if not names:
            return
        places = {word: names.index(name) for word, name in self.among(piece.file, names).items()}
        for number, row in rows:
            if len(row) != len(names):
                raise UserError(f"{piece.file} line {number}: {len(row)} cells, but there are {len(names)} columns")
            try:
                yield from in_parts(self.document({word: row[place] for word, place in places.items()}))
            except ValueError as error:
                raise UserError(f"{piece.file} line {number}: {error}") from error

    def _rows(self, stream: BinaryIO, piece: Piece) -> Iterator[tuple[int, list[str]]]:
        """(number of its first line, row)"""
        csv.field_size_limit(sys.maxsize)
        tabs = [suffix for suffix in Path(piece.file).suffixes if suffix not in COMPRESSED][-1:] == [".tsv"]
        rows = csv.reader((line for _, line in lines(stream, piece)), delimiter="\t" if tabs else self.delimiter,
                          strict=True)
        while True:
            number = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(f"{piece.file} line {number}: {error} (is a quote open, or not doubled?)") from error
            if row:
                yield number, row
