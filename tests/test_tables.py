import io
import logging
import os
import subprocess
import sys
from collections import Counter
from urllib.error import HTTPError, URLError

import pytest

datasets = pytest.importorskip("datasets")
import huggingface_hub  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from hydra.utils import instantiate  # noqa: E402

import lmzoo  # noqa: E402
from lmzoo.data import corpus, tables  # noqa: E402
from lmzoo.data.corpus import Document  # noqa: E402
from lmzoo.data.sources import Source  # noqa: E402
from lmzoo.data.tables import Hub, Parquet, Saved  # noqa: E402
from lmzoo.errors import UserError  # noqa: E402

OURS = {"train": "train", "validation": "val", "test": "test"}
TEXTS = [f"text {i} {'中' * (i % 7)}" for i in range(1000)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """What `datasets` keeps lies in a folder of the test's own, and it shows no bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    datasets.disable_progress_bars()


def texts(documents):
    return [document.text for document in documents]


def in_pieces(reader, path, megabytes, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_MB", megabytes)
    pieces = reader.pieces(path)
    return len(pieces), [document for piece in pieces for document in reader.read(piece)]


def labelled(**columns):
    names = datasets.ClassLabel(names=["negative", "positive"])
    features = {name: names if name == "label" else datasets.Value("string") for name in columns}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(),
                                  pa.dictionary(pa.int32(), pa.string())])  # fmt: skip
def test_parquet_in_pieces_of_any_size(tmp_path, monkeypatch, kind):
    table = pa.table({"id": range(1000), "text": pa.array(TEXTS).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=90)
    counts = set()
    for megabytes in (1e-6, 0.003, 0.01, 64):
        n, found = in_pieces(Parquet(), tmp_path, megabytes, monkeypatch)
        assert found == list(map(Document, TEXTS))
        counts.add(n)
    assert {1, 12} <= counts  # a piece a row group at the most


def test_several_parquet_files_and_a_column_that_is_elsewhere(tmp_path):
    for name, column in (("a", ["one"]), ("b", ["two", "three"])):
        pq.write_table(pa.table({"x": list(range(len(column))), "body": column}), tmp_path / f"{name}.parquet")
    assert texts(Parquet("body")(tmp_path)) == ["one", "two", "three"]
    assert [document.label for document in Parquet("body", "x")(tmp_path)] == ["0", "0", "1"]


@pytest.mark.parametrize(("column", "labels"), [
    (["a", "", None], ["a", None, None]),
    ([1, -2, None], ["1", "-2", None]),
    ([True, False, None], ["true", "false", None]),
    ([0.5, 2.0, None], ["0.5", "2.0", None]),
])  # fmt: skip
def test_labels(tmp_path, column, labels):
    pq.write_table(pa.table({"text": ["x", "y", ""], "label": column}), tmp_path / "a.parquet")
    assert [document[:2] for document in Parquet()(tmp_path)] == list(zip(["x", "y", ""], labels, strict=True))


@pytest.mark.parametrize(("columns", "message"), [
    ({"text": ["a", None]}, "row 2: data.text_column=text is not text but NoneType"),
    ({"text": [1, 2]}, "row 1: data.text_column=text is not text but int"),
    ({"text": [["a"], ["b"]]}, "row 1: data.text_column=text is not text but list"),
    ({"body": ["a"], "id": [1]}, "has no column data.text_column=text; the columns are body, id"),
    ({"text": pa.array([b"ok", b"\xff"]).view(pa.string())}, "after row 0: the text is not UTF-8"),
    ({"text": pa.array([], pa.string())}, "has no rows: remove it"),
])  # fmt: skip
def test_bad_tables_are_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet {message}"):
        texts(Parquet()(tmp_path))


def test_what_is_no_parquet_is_named(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for name, data in (("a.parquet", whole[:-1]), ("a.parquet", whole[len(whole) // 2 :]), ("readme.md", b"# Text")):
        (tmp_path / "a.parquet").write_bytes(whole)
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name} is not a whole parquet file: [^\\n]*$"):
            texts(Parquet()(tmp_path))


def test_a_parquet_file_that_changes_is_noticed(tmp_path):
    for rows in (TEXTS[:10], TEXTS[:30], None):
        pq.write_table(pa.table({"text": TEXTS[:20]}), tmp_path / "a.parquet")
        (piece,) = Parquet().pieces(tmp_path)
        (tmp_path / "a.parquet").unlink()
        if rows:
            pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match="a.parquet changed while it was read"):
            list(Parquet().read(piece))


def test_few_rows_are_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 3)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    seen = []
    monkeypatch.setattr(Parquet, "documents", lambda self, piece, schema, batches: map(seen.append, map(len, batches)))
    list(Parquet()(tmp_path))
    assert sum(seen) == 1000 and max(seen) == 3


def test_class_names_of_datasets(tmp_path):
    data = labelled(text=["a", "b", "c", "d"], label=[1, 0, -1, None])
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    for reader, path in ((Parquet(), tmp_path / "a.parquet"), (Saved(), tmp_path / "saved")):
        assert [document.label for document in reader(path)] == ["positive", "negative", None, None]


@pytest.mark.parametrize("megabytes", [1e-6, 0.001, 64])
def test_a_saved_folder_in_pieces_of_any_size(tmp_path, monkeypatch, megabytes):
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": range(1000)})
    data.filter(lambda row: row["n"] % 2).save_to_disk(tmp_path / "odd", num_shards=3)
    n, found = in_pieces(Saved(), str(tmp_path / "odd"), megabytes, monkeypatch)
    assert found == list(map(Document, TEXTS[1::2])) and n >= (3 if megabytes > 1 else 9)
    assert all(piece.n_bytes > 0 or megabytes < 1 for piece in Saved().pieces(str(tmp_path / "odd")))


def test_splits_of_a_saved_folder(tmp_path, caplog):
    parts = {"train": TEXTS[:5], "validation": TEXTS[5:7], "test": TEXTS[7:9], "extra": TEXTS[9:12]}
    datasets.DatasetDict({name: labelled(text=part) for name, part in parts.items()}).save_to_disk(tmp_path / "all")
    with caplog.at_level(logging.WARNING):
        found = list(Saved(splits=OURS)(str(tmp_path / "all")))
    assert found == [Document(text, None, OURS[name]) for name in OURS for text in parts[name]]
    assert "passed over: the data set's splits extra" in caplog.text
    assert {document.split for document in Saved(splits={"extra": "train"})(str(tmp_path / "all"))} == {None}
    with pytest.raises(UserError, match="has the splits train, validation, test, extra, and data.reader.splits"):
        Saved(splits={"dev": "val"}).pieces(str(tmp_path / "all"))


@pytest.mark.parametrize(("names", "splits", "whole"), [
    (["train"], {"train", "val"}, 600),
    (["train", "test"], {"train", "val", "test"}, 200),  # what it has for training isn't tested on
    (["train", "validation"], {"train", "val"}, 0),
    (["train", "validation", "test"], {"train", "val", "test"}, 200),
])  # fmt: skip
def test_what_is_held_out_of_a_data_set(tmp_path, names, splits, whole):
    parts = dict(zip(OURS, (TEXTS[:600], TEXTS[600:800], TEXTS[800:]), strict=True))
    datasets.DatasetDict({name: labelled(text=parts[name]) for name in names}).save_to_disk(tmp_path / "all")
    source = Source({"path": str(tmp_path / "all"), "val_fraction": 0.1, "cache_dir": str(tmp_path / "cache"),
                     "reader": {"_target_": "lmzoo.data.tables.Saved", "splits": OURS}})
    found = Counter(split for split, _ in source.documents())
    assert set(found) == splits and found["train"] + found["val"] * ("validation" not in names) == 600
    assert found["test"] == 200 * ("test" in names)
    assert [split for split, _ in source.documents(split="test")] == ["test"] * whole


def test_saved_folders_that_are_none(tmp_path):
    for path, message in ((str(tmp_path), "data.path=.* cannot be loaded: .*neither a `Dataset` directory"),
                          (None, "data.path=None is not the one folder"), (["a", "b"], "is not the one folder")):
        with pytest.raises(UserError, match=message):
            Saved().pieces(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_local_folder_is_read_as_the_hub_would_be(tmp_path, kind):
    parts = {"train": ["one", "two"], "validation": ["three"], "test": ["four"]}
    for name, part in parts.items():
        data, file = datasets.Dataset.from_dict({"text": part}), tmp_path / f"{name}.{kind}"
        match kind:
            case "jsonl":
                data.to_json(file)
            case "parquet":
                data.to_parquet(file)
            case "txt":
                file.write_text("\n".join(part))
    expected = [Document(text, None, OURS[name]) for name in parts for text in parts[name]]
    assert list(Hub(splits=OURS)(str(tmp_path))) == expected
    by_name = Hub(splits=OURS, name=str(tmp_path))
    assert list(by_name(None)) == expected
    again = Hub(splits=OURS, name="only the pieces are needed")  # as in another process
    assert [document for piece in by_name.pieces(None) for document in again.read(piece)] == expected


def test_data_sets_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="data.name is not set"):
        Hub().pieces(None)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    with pytest.raises(UserError, match="data.path=.* cannot be loaded: BuilderConfig 'german' not found"):
        Hub(config="german").pieces(str(tmp_path))

    def offline(name, config, **words):
        raise ConnectionError(f"Couldn't reach {name} on the Hub\nMany more lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(tables, "_check_network", lambda: None)
    with pytest.raises(UserError, match=r"^data.name=a/b cannot be loaded: Couldn't reach a/b on the Hub$"):
        Hub(name="a/b").pieces(None)


@pytest.mark.parametrize(("answer", "offline"), [
    (None, False), (HTTPError("https://hub", 503, "busy", {}, None), False), (URLError("no such host"), True),
    (TimeoutError("timed out"), True)])  # fmt: skip
def test_where_no_hub_answers_its_cache_is_all_there_is(monkeypatch, caplog, answer, offline):
    def ask(request, timeout):
        if answer:
            raise answer
        return io.BytesIO()

    for place in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(tables, "urlopen", ask)
    with pytest.raises(UserError, match="data.name=a/b cannot be loaded"):
        Hub(name="a/b").pieces(None)
    assert datasets.config.HF_HUB_OFFLINE == huggingface_hub.constants.HF_HUB_OFFLINE == offline
    assert caplog.text.count("cannot be reached") == offline


def test_a_process_that_has_imported_nothing_asks_the_hub(tmp_path):
    """huggingface_hub hands out its parts only once they are imported."""
    code = "from lmzoo.data.tables import Hub; Hub(name='a/b').pieces(None)"
    there = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | there, capture_output=True, text=True)
    assert "127.0.0.1:9 cannot be reached" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lmzoo.errors.UserError: data.name=a/b cannot be loaded")


@pytest.mark.parametrize("column", [[["a"], ["b", "c"]], [{"x": 1}, None], [float("nan")] * 2, [b"ab", b"c"]])
def test_a_column_that_holds_no_classes_is_refused_only_where_it_is_asked_for(tmp_path, column):
    pq.write_table(pa.table({"text": ["one", "two"], "label": pa.array(column)}), tmp_path / "a.parquet")
    assert list(Parquet()(tmp_path)) == [Document("one"), Document("two")]
    with pytest.raises(UserError, match="a.parquet row 1: the label .* is not a text, a number"):
        list(Parquet(label_column="label")(tmp_path))


def test_a_table_behind_a_link_is_a_table(tmp_path):
    """As in the Hub's cache, where a file's content lies under a name that is its hash."""
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "0f3c")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.parquet").symlink_to("../0f3c")
    assert texts(Parquet()(tmp_path / "corpus")) == ["one"]
    assert Parquet().pieces(tmp_path / "corpus")[0].file.endswith("corpus/a.parquet")


def test_words_of_the_command_line():
    words = ("data.name=a/b", "data.config=c", "data.text_column=body", "data.reader.splits.dev=val")
    config = lmzoo.compose("model=gpt", "task=clm", "data=hub", *words)
    expected = Hub("body", splits=OURS | {"dev": "val"}, name="a/b", config="c")
    assert instantiate(config.data.reader) == expected
    for data, reader in (("arrow", Saved("body", splits=OURS)), ("parquet", Parquet("body"))):
        config = lmzoo.compose("model=gpt", "task=clm", f"data={data}", "data.path=x", "data.text_column=body")
        assert instantiate(config.data.reader) == reader


@pytest.mark.parametrize(("words", "message"), [
    (("data=hub", "data.name=a/b", "data.path=x"), "data.name=a/b and data.path=x: give one of them"),
    (("data=parquet", "data.name=a/b"), "data.name: Parquet has no such word; it is one of data=hub"),
    (("data=text", "data.path=x", "data.config=c"), "data.config: Text has no such word; it is one of data=hub"),
])  # fmt: skip
def test_words_that_would_not_be_read(words, message):
    with pytest.raises(UserError, match=message):
        lmzoo.compose("model=gpt", "task=clm", *words)


@pytest.mark.parametrize(("module", "reader", "path"), [
    ("pyarrow.parquet", Parquet(), "a.parquet"), ("datasets", Saved(), "a"), ("datasets", Hub(), "a")])  # fmt: skip
def test_libraries_that_are_missing_are_named(tmp_path, monkeypatch, module, reader, path):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{module} is missing to read this data: pip install 'lmzoo\[data\]'"):
        reader.pieces(str(tmp_path / path))
