"""Readers: files become a stream of documents, one line of a file in memory at a time.

A reader is a function `reader(path) -> Iterator[Document]`; YAML names it and gives its other arguments. `path` is what
the user typed: a file, a folder, a glob, or a list of those (None for a reader that carries its own text). To add a
source, write such a function and a `conf/data/x.yaml`.
"""

import csv
import glob
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import UserError


class Document(NamedTuple):
    """A text, the name of its class if it has one, and the split it belongs to if its source fixes that."""

    text: str
    label: str | None = None
    split: str | None = None  # "train", "val" or "test"


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


def lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their ends as they are, without a byte order mark.

    Raises `UserError` with the file and the byte offset where it is not UTF-8.
    """
    offset = 0
    with file.open("rb") as stream:
        for line in stream:
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                byte, place = line[error.start], offset + error.start
                raise UserError(f"{file} is not UTF-8: byte 0x{byte:02x} at offset {place}; convert it or leave it out "
                                "of data.path") from error
            yield text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(line)


def read_text(path: str | list[str] | None, split: Literal["file", "blank", "line"] = "blank") -> Iterator[Document]:
    """Plain text. `split` says what a document is: a whole "file", what stands between "blank" lines, or a "line".

    White space at the ends of a document and documents of nothing else are left out.
    """
    for file in files(path):
        found, block = False, []
        for line in lines(file):
            ends = split == "line" or split == "blank" and not line.strip()
            block.append(line)
            if ends and (text := "".join(block).strip()):
                found = True
                yield Document(text)
            if ends:
                block = []
        if text := "".join(block).strip():
            yield Document(text)
        elif not found:
            raise UserError(f"{file} holds nothing but white space: remove it or leave it out of data.path")


def read_jsonl(path: str | list[str] | None, field: str | None = None,
               label_column: str | None = None) -> Iterator[Document]:
    """JSON lines: one object a line. `field` holds the text ("text" if not given; "a.b" looks into nested objects).

    `label_column` holds the class; if it is not given and the objects have "label", that is it.
    """
    for file in files(path):
        for number, line in enumerate(lines(file), 1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{where} is not a JSON object but a {type(record).__name__}")
            text = _field(record, field or "text", "data.field", where)
            if not isinstance(text, str):
                raise UserError(f"{where}: data.field={field or 'text'} is not text but {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: the text holds half of a surrogate pair, which no file can store") from error
            label = _field(record, label_column, "data.label_column", where) if label_column else record.get("label")
            yield Document(text, None if label is None else str(label))


def _field(record: dict, name: str, word: str, where: str):
    """The value of a key, or of a path of keys with dots between them."""
    value = record
    for key in [name] if name in record else name.split("."):
        if not isinstance(value, dict) or key not in value:
            names = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise UserError(f"{where} has no field {word}={name}; the fields are {names}")
        value = value[key]
    return value


def read_csv(path: str | list[str] | None, text_column: str | None = None, label_column: str | None = None,
             delimiter: str = ",") -> Iterator[Document]:
    """CSV whose first line names the columns; a file that ends in .tsv is split at tabs.

    `text_column` is "text" if not given; without `label_column` a column "label" is taken if there is one.
    """
    csv.field_size_limit(sys.maxsize)
    for file in files(path):
        rows = csv.DictReader(lines(file), delimiter="\t" if file.suffix == ".tsv" else delimiter)
        columns = rows.fieldnames or []
        for word, column in (("text_column", text_column or "text"), ("label_column", label_column)):
            if column is not None and column not in columns:
                raise UserError(f"{file} has no column data.{word}={column}; the columns are {', '.join(columns)}")
        label = label_column or ("label" if "label" in columns else None)
        for row in rows:
            text = row[text_column or "text"]
            if text is None:
                raise UserError(f"{file} line {rows.line_num}: the row has fewer than {len(columns)} columns")
            yield Document(text, row[label] if label else None)
