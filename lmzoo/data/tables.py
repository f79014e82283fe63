"""Readers of tables: parquet files, folders that `datasets` has saved, and data sets of the Hugging Face Hub.

Rows are read a few hundred at a time (a text needs its own memory), the columns of text and label only. A text that is
null is refused, an empty one is a document; a label that is null, "" or, among the classes of `datasets`, -1 is none.
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
from .corpus import Document, Reader, class_name, columns, in_parts
from .opening import CHUNK, Piece, files, imported

ROWS = 256  # that are in memory at a time
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table(Reader):
    """What readers of tables share: `text_column` is "text" if not given, `label_column` "label" if there is one."""

    text_column: str | None = None
    label_column: str | None = None

    def columns(self, file: str | Path, schema) -> tuple[str, str | None]:
        return columns(file, schema.names, self.text_column, self.label_column)

    def documents(self, piece: Piece, schema, batches: Iterable) -> Iterator[Document]:
        """The documents of batches of the columns of text and label, which are the rows of `piece`."""
        text, label = self.columns(piece.file, schema)
        names = _class_names(schema, label) if label else None
        row = piece.begin
        for batch in batches:
            try:
                texts = batch.column(text).to_pylist()
            except UnicodeDecodeError as error:
                raise UserError(f"{piece.file} after row {row}: the text is not UTF-8: {error}") from error
            for value, of_label in zip(texts, batch.column(label).to_pylist() if label else [None] * len(texts),
                                       strict=True):
                row += 1
                try:
                    if not isinstance(value, str):
                        raise ValueError(f"data.text_column={text} is not text but {type(value).__name__}")
                    if names and of_label is not None:
                        of_label = names[of_label] if of_label >= 0 else None
                    document = Document(value, class_name(of_label, bool(self.label_column)), piece.split)
                except ValueError as error:
                    raise UserError(f"{piece.file} row {row}: {error}") from error
                yield from in_parts(document)
        if row != piece.end:
            raise UserError(f"{piece.file} changed while it was read: its rows end at {row}, not at {piece.end}")


def _class_names(schema, label: str) -> list[str] | None:
    """The names of the classes that a column of whole numbers stands for, where `datasets` has noted them."""
    import pyarrow

    if b"huggingface" not in (schema.metadata or {}):
        return None
    alone = pyarrow.schema([schema.field(label)], metadata=schema.metadata)
    return getattr(imported("datasets").Features.from_arrow_schema(alone)[label], "names", None)


@dataclass(frozen=True)
class Parquet(Table):
    """Parquet files; every file that `path` means must be one."""

    def pieces(self, path: str | list[str] | None) -> list[Piece]:
        found = []
        for file in files(path):
            with _parquet(file) as table:
                text, _ = self.columns(file, table.schema_arrow)
                groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
            if not sum(group.num_rows for group in groups):
                raise UserError(f"{file} has no rows: remove it or leave it out")
            begin = end = n_bytes = 0
            for i, group in enumerate(groups, 1):
                end += group.num_rows
                of_columns = map(group.column, range(group.num_columns))
                n_bytes += sum(one.total_uncompressed_size for one in of_columns if one.path_in_schema == text)
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
            wanted = [name for name in self.columns(piece.file, table.schema_arrow) if name]
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
            text, _ = self.columns(file, table.schema)
            n_bytes = table.column(text).nbytes
            step = math.ceil(table.num_rows / max(1, n_bytes / (corpus.PIECE_MB * 1e6)))
            for begin in range(0, table.num_rows, max(1, step)):
                end = min(begin + step, table.num_rows)
                found.append(Piece(file, begin, end, n_bytes * (end - begin) // table.num_rows, split))
        return found

    def read(self, piece: Piece) -> Iterator[Document]:
        table = _mapped(piece.file)
        wanted = [name for name in self.columns(piece.file, table.schema) if name]
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
    constants, settings = imported("huggingface_hub").constants, imported("datasets").config
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
