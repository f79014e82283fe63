"""Rows become labelled documents, in the same way whatever file they lie in; what can be none is named with its row."""

import csv
import json
import logging

import datasets
import pytest

from lmzoo.data import corpus, sources
from lmzoo.data.corpus import Csv, Jsonl
from lmzoo.data.labelled import Document, whole_texts
from lmzoo.data.mixture import prepare_tokenizer
from lmzoo.data.preparation import prepare, store_name
from lmzoo.data.tables import Hub, Parquet, Saved
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_wordpiece
from small_store import settings
from test_sources import LINES, held_out

TOKENIZER = byte((), 512)
BOS, EOS = TOKENIZER.bos, TOKENIZER.eos
READERS = {"csv": Csv, "jsonl": Jsonl, "parquet": Parquet, "saved": Saved, "hub": Hub}
ROWS = {  # (kind, columns, words of the reader, the documents)
    "class": ({"text": ["a", "b"], "label": ["x", None]}, {}, [Document("a", "x"), Document("b")]),
    "pair": ({"p": ["a", "b"], "h": ["c", "中"], "label": ["x", "y"]}, {"text": "p", "pair_column": "h"},
             [Document("a", "x", second="c"), Document("b", "y", second="中")]),
    "classes": ({"text": ["a", "b", "c", "d"], "label": ["y| x|y", "x", "", "|x"]}, {"label_separator": "|"},
                [Document("a", ("x", "y")), Document("b", ("x",)), Document("c", ()), Document("d", ("x",))]),
    "number": ({"text": ["a", "b", "c"], "stars": ["-1.5e3", "7", None]}, {"label_column": "stars"},
               [Document("a", -1500.0), Document("b", 7.0), Document("c")]),
    "text": ({"text": ["a", "b"], "de": ["ä", "b c"]}, {"target_column": "de"},
             [Document("a", second="ä"), Document("b", second="b c")]),
    "text in a template": ({"text": ["a", "{}"], "target": ["c", "d"]}, {"template": "to {}: "},
                           [Document("to a: ", second="c"), Document("to {}: ", second="d")]),
    "tags": ({"words": ["EU rejects", "it"], "ner": ["B O", "O"]}, {"tags_column": "ner"},
             [Document("EU rejects", ("B", "O"), words=("EU", "rejects")), Document("it", ("O",), words=("it",))]),
}


def write(folder, name, columns):
    """A file, or a folder, for the reader of this name; its path."""
    data, file = datasets.Dataset.from_dict(columns), folder / f"rows.{name}"
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    match name:
        case "csv":
            with file.open("w", encoding="utf-8", newline="") as stream:
                writer = csv.DictWriter(stream, columns)
                writer.writeheader()
                writer.writerows(rows)
        case "jsonl":
            file.write_text("\n".join(map(json.dumps, rows)))
        case "parquet":
            data.to_parquet(file)
        case "saved":
            data.save_to_disk(file)
        case "hub":
            file.mkdir()
            data.to_parquet(file / "train.parquet")
    return str(file)


def reader(name, kind, text=None, **words):
    splits = {"splits": {"train": "train"}} if name in ("saved", "hub") else {}
    return READERS[name](**{"field" if name == "jsonl" else "text_column": text}, kind=kind, **splits, **words)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("case", ROWS)
def test_all_readers_say_the_same(tmp_path, name, case):
    columns, words, expected = ROWS[case]
    path = write(tmp_path, name, columns)
    kind = {"pair": "class", "text in a template": "text"}.get(case, case)
    found = list(reader(name, kind, **words)(path))
    assert found == expected
    assert all(type(a.label) is type(b.label) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "saved", "hub"])
def test_lists_are_lists(tmp_path, name):
    tagged = write(tmp_path, name, {"words": [["New York", "a"], ["b"]], "tags": [["B", "O"], ["O"]]})
    assert list(reader(name, "tags")(tagged)) == [
        Document("New York a", ("B", "O"), words=("New York", "a")), Document("b", ("O",), words=("b",))]
    (tmp_path / "sets").mkdir()
    sets = write(tmp_path / "sets", name, {"text": ["a", "b", "c"], "label": [["y", "x", "y"], [], None]})
    assert [document.label for document in reader(name, "classes")(sets)] == [("x", "y"), (), None]


def test_nested_fields(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": {"text": "one", "b": {"other": "two"}}, "gold": {"label": 3}}))
    words = {"field": "a.text", "pair_column": "a.b.other", "label_column": "gold.label"}
    assert list(Jsonl(**words, kind="class")(tmp_path)) == [Document("one", "3", second="two")]
    assert list(Jsonl(**words, kind="number")(tmp_path)) == [Document("one", 3.0, second="two")]


@pytest.mark.parametrize("place", ["parquet", "saved"])
def test_classes_of_datasets_have_names(tmp_path, place):
    classes = datasets.ClassLabel(names=["O", "B"])
    features = datasets.Features({"words": datasets.Sequence(datasets.Value("string")),
                                  "tags": datasets.Sequence(classes), "text": datasets.Value("string"),
                                  "label": classes})
    data = datasets.Dataset.from_dict({"words": [["a", "b"]], "tags": [[1, 0]], "text": ["t"], "label": [1]}, features)
    data.to_parquet(tmp_path / "a") if place == "parquet" else data.save_to_disk(tmp_path / "a")
    path = str(tmp_path / "a")
    assert [one.label for one in reader(place, "tags")(path)] == [("B", "O")]
    assert [one.label for one in reader(place, "class")(path)] == ["B"]
    assert [one.label for one in reader(place, "classes", label_column="tags")(path)] == [("B", "O")]
    bad = datasets.Dataset.from_dict({"words": [["a", "b"]], "tags": [[1, -1]]})
    bad.info.features = bad._info.features = datasets.Features({"words": features["words"], "tags": features["tags"]})
    bad.to_parquet(tmp_path / "bad")
    with pytest.raises(UserError, match="bad row 1: data.tags_column=tags: None in its list is not a text"):
        list(Parquet(kind="tags")(str(tmp_path / "bad")))


GOOD = {"text": "a", "label": "x", "words": ["a"], "tags": ["O"], "target": "b", "pair": "c"}


@pytest.mark.parametrize(("kind", "bad", "words", "message"), [
    ("number", {"label": "fine"}, {}, "the label 'fine' is not a finite number"),
    ("number", {"label": "nan"}, {}, "the label 'nan' is not a finite number"),
    ("number", {"label": 1e999}, {}, "the label inf is not a finite number"),
    ("number", {"label": True}, {}, "the label True is not a finite number"),
    ("number", {"label": [1]}, {}, r"the label \[1\] is not a finite number"),
    ("number", {"label": 10**400}, {}, "the label 1000*.* is not a finite number"),
    ("class", {"label": ["x"]}, {}, r"the label \['x'\] is not a text"),
    ("classes", {"label": ["x", None]}, {}, r"the labels \['x', None\] hold what is no name of a class"),
    ("classes", {"label": ["a\x1fb"]}, {}, "the labels .* hold what is no name of a class"),
    ("classes", {"label": [["x"]]}, {}, r"the label \['x'\] is not a text"),
    ("classes", {"label": {"x": 1}}, {}, "the label {'x': 1} is not a text"),
    ("tags", {"tags": ["O", "O"]}, {}, "2 tags for 1 words"),
    ("tags", {"tags": None}, {}, "data.tags_column=tags is no list of tags but NoneType"),
    ("tags", {"tags": [None]}, {}, "data.tags_column=tags: None in its list is not a text"),
    ("tags", {"tags": [1.5]}, {}, "data.tags_column=tags: 1.5 in its list is not a text"),
    ("tags", {"words": [3]}, {}, "data.words_column=words: 3 in its list is not a text"),
    ("tags", {"words": {"a": 1}}, {}, "data.words_column=words is no list of words but dict"),
    ("tags", {"words": [], "tags": []}, {}, "the text is empty: leave the row out"),
    ("class", {"text": " \n"}, {}, "the text is empty: leave the row out"),
    ("class", {"pair": ""}, {"pair_column": "pair"}, "the second text is empty: leave the row out"),
    ("class", {"pair": 3}, {"pair_column": "pair"}, "data.pair_column=pair is not text but int"),
    ("text", {"target": None}, {}, "data.target_column=target is not text but NoneType"),
    ("class", {"pair": "\ud800"}, {"pair_column": "pair"}, "the text holds half of a surrogate pair"),
    ("tags", {"words": ["\ud800"]}, {}, "the text holds half of a surrogate pair"),
    ("class", {"pair": "b" * 30}, {"pair_column": "pair"}, "its two texts hold 31 characters, more than the 20"),
    ("tags", {"words": ["b" * 30]}, {}, "its words hold 30 characters, more than the 20"),
])  # fmt: skip
def test_what_can_be_no_label_is_named_with_its_row(tmp_path, monkeypatch, kind, bad, words, message):
    monkeypatch.setattr("lmzoo.data.corpus.LONGEST", 20)
    good = {"label": "3"} if kind == "number" else {}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(GOOD | row) for row in (good, good, bad)))
    documents = Jsonl(kind=kind, **words)(tmp_path)
    next(documents)
    next(documents)
    with pytest.raises(UserError, match=f"a.jsonl line 3: {message}") as error:
        next(documents)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "place"), [("csv", "rows.csv line 3"), ("parquet", "rows.parquet row 2")])
def test_a_row_of_any_file_is_named(tmp_path, name, place):
    path = write(tmp_path, name, {"text": ["a", "b"], "label": ["1", "b"]})
    with pytest.raises(UserError, match=f"{place}: the label 'b' is not a finite number"):
        list(reader(name, "number")(path))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("kind", "words", "missing"), [
    ("class", {}, "label_column=label"), ("number", {"label_column": "x"}, "label_column=x"),
    ("class", {"label_column": "b", "pair_column": "x"}, "pair_column=x"), ("text", {}, "target_column=target"),
    ("tags", {}, "words_column=words"), ("tags", {"words_column": "text"}, "tags_column=tags")])  # fmt: skip
def test_a_column_that_is_not_there(tmp_path, name, kind, words, missing):
    path = write(tmp_path, name, {"text": ["a"], "b": ["b"], **{f"column {i}": ["c"] for i in range(20)}})
    found = "text, b, column 0, column 1, .* and 10 more"
    with pytest.raises(UserError, match=f"no (column|field) data.{missing}; the (columns|fields) are {found}$"):
        list(reader(name, kind, **words)(path))


def test_without_a_task_only_the_texts_are_wanted(tmp_path):
    """As for a tokenizer: also where the columns are named that a task would need."""
    path = write(tmp_path, "csv", {"text": ["a"], "other": ["b"], "w": ["c d"], "label": ["x"]})
    assert list(Csv()(path)) == [Document("a", "x")]
    assert list(Csv(target_column="other")(path)) == [Document("a", "x", second="b")]
    assert list(Csv(words_column="w")(path)) == [Document("c d", "x", words=("c", "d"))]


def test_equal_documents_have_equal_content():
    one = [Document("a"), Document("a b"), *(Document(a, second=b) for a, b in (("a", "b"), ("a", ""), ("", "a")))]
    assert len({document.content for document in one}) == len(one)
    assert Document("a", "x", second="中").content == Document("a", "y", second="中").content
    assert [document.n_bytes for document in (Document("中"), Document("a", second="中"))] == [3, 4]


# --- prepared

def labelled(tmp_path, kind, rows, **words):
    """A configuration of a task that wants labels of a kind, on rows of jsonl."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), **words.pop("data", {})}
    return settings(tmp_path, "lmzoo.data.corpus.Jsonl", words, **data) | {"task": {"labels": kind}}


def test_pairs_and_numbers_are_prepared(tmp_path):
    """Both texts are tokenised, learnt by the tokenizer, and decide the split."""
    rows = [{"text": "same", "b": f"{line}Ω", "label": i / 7} for i, line in enumerate(LINES)]
    config = labelled(tmp_path, "number", rows, pair_column="b")
    store, tokenizer = prepare(config, TOKENIZER), prepare_tokenizer(config)
    assert tokenizer.unk not in tokenizer.encode("same Ω") and store.kind == "number" and store.labels is None
    for name in ("train", "val"):
        split = store[name]
        chosen = [row for row in rows if held_out(repr((row["text"], row["b"])), 0.1) == (name == "val")]
        assert len(chosen) == split.n_documents > 5 and split.n_unlabelled == 0
        assert [split.label(i) for i in range(split.n_documents)] == [row["label"] for row in chosen]
        for i, row in enumerate(chosen):
            begin, end = split.span(i)
            first, second = TOKENIZER.encode(row["text"]), TOKENIZER.encode(row["b"])
            assert split.read(begin, end).tolist() == [BOS, *first, EOS, *second, EOS]
            assert split.second(i) == len(first) + 2
    assert store.xz_bits_per_byte is None


def test_tags_are_prepared_and_what_is_lost_is_said(tmp_path, caplog):
    rows = [{"words": ["ab", "", "c"], "tags": ["B", "I", "O"]}, {"words": ["c"], "tags": ["O"]}]
    rows[0]["words"][1] = "\u0301"
    own = train_wordpiece(["ab c"] * 9, 60)
    with caplog.at_level(logging.WARNING):
        split = prepare(labelled(tmp_path, "tags", rows, data={"val_fraction": 0}), own)["train"]
    assert split.labels == ["B", "O"] and split.n_untagged == 1
    assert "leaves 1 words without a token, so their tags are neither learnt nor measured" in caplog.text
    found = split.tags(0, split.n_tokens)
    assert found[found >= 0].tolist() == [0, 1, 1]


def test_known_classes_of_every_kind(tmp_path):
    for kind, row, unknown in (("classes", {"text": "a", "label": ["x", "q"]}, "q"),
                               ("tags", {"words": ["a", "b"], "tags": ["q", "x"]}, "q")):
        config = labelled(tmp_path, kind, [row])
        with pytest.raises(UserError, match=f"the text 'a.*' has the label '{unknown}'; the model knows x, y"):
            prepare(config, TOKENIZER, split="test", labels=["x", "y"])
        assert prepare(config, TOKENIZER, split="test", labels=["x", "y", "q"]).labels == ["x", "y", "q"]


def read_wrongly(path):
    yield from (Document("a", "x"), Document("b", None), Document("c", 3.5))


@pytest.mark.parametrize(("kind", "wrong"), [("class", "3.5"), ("number", "'x'"), ("classes", "'x'"), ("tags", "'x'"),
                                             ("text", "'x'")])
def test_a_label_of_another_kind_from_a_function_is_refused(tmp_path, kind, wrong):
    (tmp_path / "a").write_text("x")
    config = settings(tmp_path, f"{__name__}.read_wrongly", {}, path=str(tmp_path / "a"), val_fraction=0)
    with pytest.raises(UserError, match=f"the text '.' has the label {wrong}, but the task wants task.labels={kind}"):
        prepare(config | {"task": {"labels": kind}}, TOKENIZER)


def test_stores_of_other_kinds_are_others(tmp_path):
    config = labelled(tmp_path, "class", [{"text": str(i), "label": str(i % 2)} for i in range(40)])
    kinds = (None, "class", "number", "classes")
    names = [store_name(config | {"task": {"labels": kind}}, TOKENIZER) for kind in kinds]
    assert len(set(names)) == 4


@pytest.mark.parametrize("kind", ["class", "classes", "number", "tags", "text"])
def test_processes_prepare_the_same(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(corpus, "PIECE_MB", 0.002)
    monkeypatch.setattr(sources, "PART_MB", (0.004, 0.004))
    rows = [{"text": line, "pair": f"{i}", "label": i % 5, "words": line.split(), "tags": [c[0] for c in line.split()],
             "target": line[::-1]} for i, line in enumerate(LINES)]
    pair = {"pair_column": "pair"} if kind in ("class", "classes", "number") else {}
    shards = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        store = prepare(labelled(folder, kind, rows, data={"processes": processes}, **pair), TOKENIZER)
        shards[processes] = [[shard["sha256"] for shard in store[split].shards] for split in store.splits]
    assert shards[1] == shards[2] and len(shards[1][0]) > 3


@pytest.mark.parametrize("name", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("measured", [True, False])
def test_a_column_says_which_split_a_row_is_of(tmp_path, name, measured):
    """Where it says of none that it is for validation, a share of what is for training is held out."""
    named = [{0: "test", 1: "Dev" if measured else "train"}.get(i % 10, "train") for i in range(len(LINES))]
    path = write(tmp_path, name, {"text": LINES, "part": named})
    config = settings(tmp_path, f"lmzoo.data.{'tables' if name == 'parquet' else 'corpus'}.{READERS[name].__name__}",
                      {"split_column": "part"}, path=path)
    found = list(sources.Source(config["data"]).documents())
    assert [document.text for _, document in found] == LINES
    for (split, document), told in zip(found, named, strict=True):
        kept = "val" if not measured and held_out(document.text, 0.1) else "train"
        assert split == {"test": "test", "Dev": "val", "train": kept}[told]
    assert {split for split, _ in found} == {"train", "val", "test"}
    assert {split for split, _ in sources.Source(config["data"]).documents(split="test")} == {"test"}


@pytest.mark.parametrize("word", ["", "all", "3"])
def test_what_is_no_split_is_named(tmp_path, word):
    path = write(tmp_path, "csv", {"text": ["a", "b"], "split": ["train", word]})
    with pytest.raises(UserError, match="line 3: data.split_column=split: .* is none of train, val, valid, "):
        list(Csv(split_column="split")(path))


@pytest.mark.parametrize("part", ["test", "dev"])
def test_a_column_that_leaves_nothing_to_train_on_is_named(tmp_path, part):
    config = labelled(tmp_path, "class", [{"text": f"{i}", "label": "x", "part": part} for i in range(6)],
                      split_column="part")
    told = {"test": "6 test", "dev": "6 val"}[part]
    with pytest.raises(UserError, match=rf"data.split_column=part leaves no row to train on \({told}\): say train of"):
        prepare(config, TOKENIZER)


def test_the_parts_of_a_long_text_are_one():
    parts = [Document("a b", "x", more=True), Document(" c", "x", more=True), Document(" d", "x"), Document("e", "y")]
    assert list(whole_texts(parts)) == [Document("a b c d", "x"), Document("e", "y")]
