"""Readers of tables: parquet files, folders that `datasets` has saved, and data sets of the Hugging Face Hub.

Rows are read a few hundred at a time (a text needs its own memory), the columns of text and label only. A text that is
null is refused, an empty one is a document (but for a task that wants labels); a label that is null, "" or, among the
classes of `datasets`, -1 is none.
pyarrow and datasets are imported when they are used: they come with `pip install 'lmzoo[data]'`.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..errors import UserError
from . import corpus
from .corpus import Reader, in_parts
from .labelled import Columns, Document
from .opening import CHUNK, Piece, files, imported

ROWS = 256  # that are in memory at a time
OF_LABELS = ("label_column", "tags_column")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table(Columns, Reader):
    """What readers of tables share: the columns are those of `Columns`."""

    text_column: str | None = None
    label_column: str | None = None

    def texts(self, file: str | Path, schema) -> list[str]:
        """The columns of text."""
        return [name for word, name in self.among(file, schema.names).items() if word not in OF_LABELS]

    def documents(self, piece: Piece, schema, batches: Iterable) -> Iterator[Document]:
        """The documents of batches of the columns of text and label, which are the rows of `piece`."""
        columns = self.among(piece.file, schema.names)
        classes = {word: found for word in OF_LABELS if word in columns
                   and (found := _class_names(schema, columns[word]))}
        number = piece.begin
        for batch in batches:
            try:
                cells = {word: batch.column(name).to_pylist() for word, name in columns.items()}
            except UnicodeDecodeError as error:
                raise UserError(f"{piece.file} after row {number}: the text is not UTF-8: {error}") from error
            for values in zip(*cells.values(), strict=True):
                number += 1
                row = dict(zip(cells, values, strict=True))
                try:
                    row |= {word: _named(row[word], found) for word, found in classes.items()}
                    yield from in_parts(self.document(row, piece.split))
                except ValueError as error:
                    raise UserError(f"{piece.file} row {number}: {error}") from error
        if number != piece.end:
            raise UserError(f"{piece.file} changed while it was read: its rows end at {number}, not at {piece.end}")


def _class_names(schema, label: str) -> list[str] | None:
    """The names of the classes that a column of whole numbers, or of lists of them, stands for, where `datasets` has
    noted them."""
    import pyarrow

    if b"huggingface" not in (schema.metadata or {}):
        return None
    alone = pyarrow.schema([schema.field(label)], metadata=schema.metadata)
    feature = imported("datasets").Features.from_arrow_schema(alone)[label]
    return getattr(getattr(feature, "feature", feature), "names", None)


def _named(value, names: list[str]):
    """The name of a class, or a list of such; None for -1, which is none."""
    if isinstance(value, list):
        return [_named(number, names) for number in value]
    if value is None or value == -1:
        return None
    if not 0 <= value < len(names):
        raise ValueError(f"the label {value} is not one of {len(names)} classes")
    return names[value]


@dataclass(frozen=True)
class Parquet(Table):
    """Parquet files; every file that `path` means must be one."""

    def pieces(self, path: str | list[str] | None) -> list[Piece]:
        found = []
        for file in files(path):
            with _parquet(file) as table:
                texts = self.texts(file, table.schema_arrow)
                groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            if not sum(group.num_rows for group in groups):
                raise UserError(f"{file} has no rows: remove it or leave it out")
            begin = end = n_bytes = 0
            for i, group in enumerate(groups, 1):
                end += group.num_rows
                of_columns = map(group.column, range(group.num_columns))
                n_bytes += sum(one.total_uncompressed_size for one in of_columns if one.path_in_schema in texts
                               or one.path_in_schema.partition(".")[0] in texts)  # a list is a column below its own
                if n_bytes >= corpus.PIECE_MB * 1e6 or i == len(groups):
                    found.append(Piece(str(file), begin, end, n_bytes))
                    begin, n_bytes = end, 0
        return found

    def read(self, piece: Piece) -> Iterator[Document]:
        with _parquet(piece.file) as table:
            groups, begin = [], 0
            for i in range(table.num_row_groups):
                if piece.begin <= begin < piece.end:
                    groups.append(i)
                begin += table.metadata.row_group(i).num_rows
            wanted = list(dict.fromkeys(self.among(piece.file, table.schema_arrow.names).values()))
            yield from self.documents(piece, table.schema_arrow, table.iter_batches(ROWS, groups, columns=wanted))


@contextmanager
def _parquet(file: str | Path) -> Iterator:
    pyarrow, parquet = imported("pyarrow"), imported("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file, buffer_size=CHUNK) as table:
            yield table
    except FileNotFoundError as error:
        raise UserError(f"{file} changed while it was read: it is gone") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a whole parquet file: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True)
class Saved(Table):
    """A folder that `datasets.save_to_disk` wrote. `splits` says which of its splits are our "train", "val" and "test".

    The others are passed over, with a warning. With nothing but "train" it is a source without splits.
    """

    splits: Mapping[str, str] = field(default_factory=dict)

    def load(self, path: str | None):
        if not isinstance(path, str | Path):
            raise UserError(f"data.path={path} is not the one folder that datasets.save_to_disk wrote")
        return _loaded(f"data.path={path}", "load_from_disk", str(Path(path).expanduser()), keep_in_memory=False)

    def pieces(self, path: str | None) -> list[Piece]:
        loaded = self.load(path)
        if not isinstance(loaded, dict):
            return self._pieces_of(loaded, None)
        passed_over = sorted(set(loaded) - set(self.splits))
        ours = {name: self.splits[name] for name in loaded if name in self.splits}
        if not ours:
            raise UserError(f"the data set has the splits {', '.join(loaded)}, and data.reader.splits none of them: "
                            f"say which is which, for example data.reader.splits.{passed_over[0]}=train")
        if passed_over:
            log.warning("passed over: the data set's splits %s, which data.reader.splits does not name",
                        ", ".join(passed_over))
        if set(ours.values()) == {"train"}:
            ours = dict.fromkeys(ours)
        return [piece for name, split in ours.items() for piece in self._pieces_of(loaded[name], split)]

    def _pieces_of(self, data, split: str | None) -> list[Piece]:
        found = []
        for file in [one["filename"] for one in data.cache_files]:
            table = _mapped(file)
            n_bytes = sum(table.column(name).nbytes for name in self.texts(file, table.schema))
            step = math.ceil(table.num_rows / max(1, n_bytes / (corpus.PIECE_MB * 1e6)))
            for begin in range(0, table.num_rows, max(1, step)):
                end = min(begin + step, table.num_rows)
                found.append(Piece(file, begin, end, n_bytes * (end - begin) // table.num_rows, split))
        return found

    def read(self, piece: Piece) -> Iterator[Document]:
        table = _mapped(piece.file)
        wanted = list(dict.fromkeys(self.among(piece.file, table.schema.names).values()))
        rows = table.slice(piece.begin, piece.end - piece.begin).select(wanted)
        yield from self.documents(piece, table.schema, rows.to_batches(max_chunksize=ROWS))


def _mapped(file: str):
    """The rows of an Arrow file, which stay on the disk until they are read."""
    return _loaded(file, "Dataset.from_file", file).data.table


def _loaded(what: str, function: str, *args, **kwargs):
    """What a function of `datasets` returns; it raises errors of any kind, which become one line here."""
    call = imported("datasets")
    for name in function.split("."):
        call = getattr(call, name)
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise UserError(f"{what} cannot be loaded: {_first_line(error)}") from error


def _check_network() -> None:
    """Where nothing answers at the Hub's address, let its library look into its cache at once: else it tries for half
    a minute first."""
    constants, settings = imported("huggingface_hub.constants"), imported("datasets").config
    if settings.HF_HUB_OFFLINE:
        return
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=10).close()
    except HTTPError:
        pass  # an answer
    except OSError as error:
        log.warning("%s cannot be reached (%s): only what is in the cache of the Hub can be read", constants.ENDPOINT,
                    getattr(error, "reason", error))
        constants.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE = True


@dataclass(frozen=True)
class Hub(Saved):
    """A data set of the Hugging Face Hub by its `name` and `config`, or a local folder (`path`) laid out as one.

    `datasets` keeps it in its cache as Arrow files, which are what is read; without a network it comes from there.
    """

    name: str | None = None
    config: str | None = None

    def load(self, path: str | None):
        if not (path or self.name):
            raise UserError("data.name is not set: give a data set of the Hub, or a local one as data.path")
        if not path:
            if not Path(self.name).exists():
                _check_network()
            return _loaded(f"data.name={self.name}", "load_dataset", self.name, self.config, keep_in_memory=False)
        config = None if self.name else self.config  # a folder beside a named data set (data.val_path) has its own
        return _loaded(f"data.path={path}", "load_dataset", str(Path(path).expanduser()), config, keep_in_memory=False)
