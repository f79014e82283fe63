import json
import lzma
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lmzoo.data import corpus as readers
from lmzoo.data import preparation, sources, workers
from lmzoo.data.mixture import prepare_tokenizer
from lmzoo.data.packing import JoinedRows
from lmzoo.data.preparation import prepare
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte
from small_store import settings, texts
from test_sources import LINES, held_out

TOKENIZER = byte((), 512)
BOS, EOS = TOKENIZER.bos, TOKENIZER.eos


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    return settings(tmp_path, path=str(tmp_path / "corpus.txt"))


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a kilobyte, of pieces of half of one."""
    monkeypatch.setattr(readers, "PIECE_MB", 0.0005)
    monkeypatch.setattr(sources, "PART_MB", (0.001, 0.001))


@contextmanager
def counted(monkeypatch):
    """The numbers of the parts that are tokenised inside."""
    parts, tokenise = [], workers.Workshop._tokenise
    with monkeypatch.context() as patch:
        patch.setattr(workers.Workshop, "_tokenise",
                      lambda self, job, *args: parts.append(job["part"]) or tokenise(self, job, *args))
        yield parts


@contextmanager
def unprivileged():
    """Not as root, who may write anywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("unique", [False, True])
def test_sets_that_have_names(tmp_path, small_parts, unique):
    """Each is a stream of its own, whatever parts its documents come from; of equal texts the first set's is kept."""
    held = {"a-1": [f"{i} of a" for i in range(300)] + ["both"], "x": ["both", *(f"{i} of x" for i in range(300))]}
    for name, lines in {"train": LINES, **held}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    sets = {name: str(tmp_path / f"{name}.txt") for name in reversed(held)}
    store = prepare(settings(tmp_path, path=str(tmp_path / "train.txt"), val_path=sets, deduplicate=unique), TOKENIZER)
    store.verify()
    found = {name: [TOKENIZER.decode(own.read(*own.span(i))) for i in range(own.n_documents)]
             for name, own in store.sets("val").items()}
    assert found == {"a-1": held["a-1"], "x": held["x"][unique:]} and store.left_out["documents"] == unique
    assert len(store.sets("val")["x"].shards) > 1 and store.splits == ["train", "val"]
    assert texts(store, TOKENIZER)["val"] == found["a-1"] + found["x"] and not store.sets("test")
    rows = JoinedRows(store.sets("val"), "fit", 65, 64)
    assert sum(len(rows[row]["tokens"]) for row in range(len(rows))) == store["val"].n_tokens
    assert len(list(store.folder.glob("*.plan"))) == 2


def test_the_stream_is_that_of_the_documents(corpus):
    store = prepare(corpus, TOKENIZER)
    store.verify()
    for name, chosen in (("train", [line for line in LINES if not held_out(line, 0.1)]),
                         ("val", [line for line in LINES if held_out(line, 0.1)])):
        expected = sum(([BOS, *TOKENIZER.encode(line), EOS] for line in chosen), [])
        assert store[name].read(0, store[name].n_tokens).tolist() == expected
        assert store[name].n_documents == len(chosen) and store[name].n_bytes == sum(map(len, chosen))


def test_the_split_of_a_document_depends_on_its_text_alone(tmp_path, corpus):
    before = set(texts(prepare(corpus, TOKENIZER), TOKENIZER)["val"])
    (tmp_path / "other.txt").write_text("\n".join(["new first line", *reversed(LINES)]))
    after = texts(prepare(settings(tmp_path, path=str(tmp_path / "other.txt")), TOKENIZER), TOKENIZER)
    assert before == set(after["val"]) - {"new first line"}


def test_very_long_and_empty_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 100)
    long = " ".join(f"word{i}中" for i in range(1000))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in (
        ("", "x"), (long, "y"), ("b", None), (long + "!", "x"))))
    config = settings(tmp_path, "lmzoo.data.corpus.Jsonl", {}, path=str(tmp_path / "a.jsonl"), val_fraction=0)
    split = prepare(config | {"task": {"whole_word": True}}, TOKENIZER)["train"]
    encoded = [TOKENIZER.encode_words([text])[0] for text in ("", long, "b", long + "!")]
    assert split.read(0, split.n_tokens).tolist() == sum(([BOS, *ids, EOS] for ids, _ in encoded), [])
    assert split.word_starts(0, split.n_tokens).tolist() == sum(([True, *starts, True] for _, starts in encoded), [])
    assert [split.label(i) for i in range(4)] == [0, 1, None, 0] and split.n_unlabelled == 1
    assert split.n_bytes == 2 * len(long.encode()) + 2


def test_classes_of_a_trained_model(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nfine,good\nawful,bad\n")
    config = settings(tmp_path, "lmzoo.data.corpus.Csv", {}, path=str(tmp_path / "a.csv"))
    store = prepare(config, TOKENIZER, split="test", labels=["worse", "good", "bad"])
    assert [store["test"].label(i) for i in range(2)] == [1, 2] and store.labels == ["worse", "good", "bad"]
    with pytest.raises(UserError, match="the text 'awful' has the label 'bad'; the model knows good, best"):
        prepare(config, TOKENIZER, split="test", labels=["good", "best"])


def test_bytes_and_yardstick_are_of_the_raw_text(tmp_path):
    train, val = ["Ein Café, 北京", "zweite Zeile " * 20], ["zweite Zeile Café"]
    (tmp_path / "train.txt").write_text("\n".join(train), encoding="utf-8")
    (tmp_path / "val.txt").write_text("\n".join(val), encoding="utf-8")
    config = settings(tmp_path, path=str(tmp_path / "train.txt"), val_path=str(tmp_path / "val.txt"))
    store = prepare(config, TOKENIZER)
    assert store["val"].n_bytes == 18 and store["train"].n_bytes == 17 + 259  # "zweite Zeile " is stripped at its end
    seen = "".join(text.strip() + "\0" for text in train).encode()
    more = len(lzma.compress(seen + val[0].encode() + b"\0")) - len(lzma.compress(seen))
    assert store.xz_bits_per_byte == 8 * more / 18 > 0


@pytest.mark.parametrize(("megabytes", "has_one"), [(0.00869, False), (0.008691, True)])  # with a NUL for each line
def test_a_large_corpus_gets_no_yardstick(corpus, monkeypatch, megabytes, has_one):
    monkeypatch.setattr(preparation, "XZ_MB", megabytes)
    assert (prepare(corpus, TOKENIZER).xz_bits_per_byte is not None) == has_one


def test_a_prepared_corpus_is_not_prepared_again_until_something_changes(tmp_path, corpus, monkeypatch):
    with counted(monkeypatch) as parts:
        first = prepare(corpus, TOKENIZER).folder
        assert prepare(corpus, TOKENIZER).folder == first and len(parts) == 1
        assert prepare(corpus, byte((), 512, sentinels=1)).folder != first  # another tokenizer
        assert not prepare(corpus, TOKENIZER)["train"].has_words and len(parts) == 2
        assert prepare(corpus | {"task": {"whole_word": True}}, TOKENIZER)["train"].has_words
        changed = (tmp_path / "corpus.txt").read_text().replace("line 7 ", "LINE 7 ")  # of the same length
        (tmp_path / "corpus.txt").write_text(changed)
        found = texts(prepare(corpus, TOKENIZER), TOKENIZER)
        assert "LINE 7 of some text" in found["train"] + found["val"] and len(parts) == 4
        corpus["data"]["processes"] = 7  # changes nothing
        (tmp_path / "elsewhere").mkdir()
        corpus["data"]["path"] = str((tmp_path / "corpus.txt").rename(tmp_path / "elsewhere" / "corpus.txt"))
        assert texts(prepare(corpus, TOKENIZER), TOKENIZER) == found and len(parts) == 4
        monkeypatch.setattr(sources, "FORMAT", sources.FORMAT + 1)
        prepare(corpus, TOKENIZER)
        assert len(parts) == 5


@pytest.mark.parametrize("unique", [False, True])
def test_finished_parts_are_kept_whatever_stops_a_preparation(corpus, monkeypatch, small_parts, unique):
    corpus["data"]["deduplicate"] = unique
    elsewhere = corpus["data"] | {"cache_dir": corpus["data"]["cache_dir"] + "2"}
    whole = prepare(corpus | {"data": elsewhere}, TOKENIZER)
    add, n_added = workers.ShardWriter.add, [0]

    def interrupted(*args):
        n_added[0] += 1
        if n_added[0] % 4 == 0:
            raise KeyboardInterrupt
        add(*args)

    with counted(monkeypatch) as parts:
        monkeypatch.setattr(workers.ShardWriter, "add", interrupted)
        n_stops, store = 0, None
        while store is None:
            try:
                store = prepare(corpus, TOKENIZER)
            except KeyboardInterrupt:
                n_stops += 1
    assert 3 < n_stops < 20 and len(parts) == 9 + n_stops and sorted(set(parts)) == list(range(9))  # one anew
    store.verify()
    assert texts(store, TOKENIZER) == texts(whole, TOKENIZER)
    assert {file.name for file in store.folder.iterdir()} == {file.name for file in whole.folder.iterdir()}
    assert [file.name for file in store.folder.parent.iterdir() if "partial" in file.name and file.is_dir()] == []


def five_files(tmp_path, third):
    (tmp_path / "five").mkdir(exist_ok=True)
    for number in range(5):
        name = f"{number}.txt"
        if not (tmp_path / "five" / name).exists():
            (tmp_path / "five" / name).write_text("\n".join(LINES[number * 80:(number + 1) * 80]))
    (tmp_path / "five" / "3.txt").write_bytes(third)
    return settings(tmp_path, path=str(tmp_path / "five"))


def test_bad_text_costs_only_its_part(tmp_path, monkeypatch, small_parts):
    good = "\n".join(LINES[240:320]).encode()
    with counted(monkeypatch) as parts:
        for bad, message in ((good + b"\n\xff", "3.txt is not UTF-8: byte 0xff at offset"), (b"ab\0", "3.txt .*NUL")):
            with pytest.raises(UserError, match=message):
                prepare(five_files(tmp_path, bad), TOKENIZER)
        n_before, begun = len(parts), sorted(set(parts))
        store = prepare(five_files(tmp_path, good), TOKENIZER)
        assert all(parts.count(part) == 1 for part in begun[:-3])  # three parts read the file that was mended
    assert n_before > 4 and sorted(texts(store, TOKENIZER)["train"]) == sorted(
        line for line in LINES if not held_out(line, 0.1))


def test_a_compressed_file_that_is_cut_off(tmp_path, monkeypatch, small_parts):
    import gzip

    whole = gzip.compress("\n".join(LINES).encode(), 0)
    config = settings(tmp_path, path=[str(tmp_path / f"{number}.txt.gz") for number in range(3)])
    for number in range(3):
        (tmp_path / f"{number}.txt.gz").write_bytes(whole[:-20] if number == 1 else whole)
    with pytest.raises(UserError, match="1.txt.gz cannot be read to its end"):
        prepare(config, TOKENIZER)
    (tmp_path / "1.txt.gz").write_bytes(whole)
    with counted(monkeypatch) as parts:
        assert prepare(config, TOKENIZER)["train"].n_documents > 1000
    assert parts == [1, 2]


def test_nothing_is_left_where_nothing_was_finished(tmp_path, corpus):
    (tmp_path / "corpus.txt").write_bytes("\n".join(LINES).encode() + b"\n\xff")
    with pytest.raises(UserError, match="corpus.txt is not UTF-8: byte 0xff at offset"):
        prepare(corpus, TOKENIZER)
    assert not [path for path in (tmp_path / "cache" / "stores").iterdir() if path.is_dir()]


@pytest.mark.parametrize("change", ["grow", "touch", "vanish"])
def test_a_file_that_changes_meanwhile_is_refused_at_once(tmp_path, corpus, monkeypatch, small_parts, change):
    file, add = tmp_path / "corpus.txt", workers.ShardWriter.add
    text = file.read_text()

    def meddle(*args):
        add(*args)
        if file.exists() and change == "vanish":
            file.unlink()
        elif file.exists() and file.read_text() == text:
            file.write_text(text + "\none more" if change == "grow" else text[:-1] + "?")

    with monkeypatch.context() as patch, counted(monkeypatch) as parts:
        patch.setattr(workers.ShardWriter, "add", meddle)
        with pytest.raises(UserError, match="corpus.txt.*changed while it was"):
            prepare(corpus, TOKENIZER)
        assert parts == [0, 1]  # a part's text is read when it is tokenised, so the second finds out at the latest
    file.write_text(text)
    assert sum(map(len, texts(prepare(corpus, TOKENIZER), TOKENIZER).values())) == len(LINES)


def test_text_that_came_before_is_left_out(tmp_path, monkeypatch, small_parts, caplog):
    draw = np.random.default_rng(0)
    lines = [f"text {number} 中" for number in draw.integers(0, 200, 500)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:400]))
    (tmp_path / "val.txt").write_text("\n".join([*lines[400:], "of its own"]))
    paths = {"path": str(tmp_path / "train.txt"), "val_path": str(tmp_path / "val.txt")}
    whole = prepare(settings(tmp_path, **paths), TOKENIZER)
    assert whole.left_out == {"documents": 0, "bytes": 0} and not caplog.text
    store = prepare(settings(tmp_path, **paths, deduplicate=True), TOKENIZER)
    kept = list(dict.fromkeys([*lines, "of its own"]))
    n_train = len(set(lines[:400]))
    assert texts(store, TOKENIZER) == {"train": kept[:n_train], "val": kept[n_train:]}
    n_bytes = sum(len(line.encode()) for line in [*lines, "of its own"]) - sum(len(line.encode()) for line in kept)
    assert store.left_out == {"documents": 501 - len(kept), "bytes": n_bytes}
    assert f"left out {501 - len(kept)} documents ({n_bytes:,} bytes) whose text had come before" in caplog.text
    assert store.xz_bits_per_byte != whole.xz_bits_per_byte > 0


def test_no_documents_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    config = settings(tmp_path, "lmzoo.data.corpus.Csv", {}, path=str(tmp_path / "a.csv"))
    for fraction, split in ((0, None), (0.1, "test")):
        config["data"]["val_fraction"] = fraction
        with pytest.raises(UserError, match="a.csv.* holds no documents"):
            prepare(config, TOKENIZER, split=split)
    (tmp_path / "a.csv").write_text("text\nab\nab\n")  # the same text twice, which is held out
    with pytest.raises(UserError, match=r"data.path=.*a.csv: its text is all held out .* \(2 documents; equal"):
        prepare(settings(tmp_path, "lmzoo.data.corpus.Csv", {}, path=str(tmp_path / "a.csv")), TOKENIZER)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").touch()
    corpus["data"]["cache_dir"] = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match="cannot prepare .*data.cache_dir"):
        prepare(corpus, TOKENIZER)


def test_a_store_in_a_cache_that_is_read_only(tmp_path_factory, corpus):
    import shutil
    import tempfile

    here = Path(tempfile.mkdtemp())  # where others may look, unlike pytest's own folders
    try:
        here.chmod(0o755)
        (here / "corpus.txt").write_text("\n".join(LINES))
        config = settings(here, path=str(here / "corpus.txt"))
        expected = texts(prepare(config, TOKENIZER), TOKENIZER)
        for folder in (here / "cache", here / "cache" / "stores"):
            folder.chmod(0o555)
        with unprivileged():
            store = prepare(config, TOKENIZER)
            store.verify()
            assert texts(store, TOKENIZER) == expected
            with pytest.raises(UserError, match="cannot prepare .*Permission denied.*data.cache_dir names another"):
                prepare(config, TOKENIZER, split="test")
    finally:
        shutil.rmtree(here)


def test_a_tokenizer_is_trained_once_on_training_text(tmp_path, corpus, monkeypatch):
    (tmp_path / "val.txt").write_text("zzz")
    corpus["data"]["val_path"] = str(tmp_path / "val.txt")
    first = prepare_tokenizer(corpus)
    assert first.id("l") is not None and first.id("z") is None
    monkeypatch.setattr(preparation.tokenizers, "prepare", None)
    assert prepare_tokenizer(corpus).hash == first.hash


@pytest.mark.parametrize(("lines", "fraction", "n"), [
    (["the same"] * 9, 0.1, "9 documents"), (["one"], 0.999999, "1 document;"), (["a", "b"], 0.999999, "2 documents")])
def test_nothing_left_to_train_on_is_explained(tmp_path, lines, fraction, n):
    (tmp_path / "a.txt").write_text("\n".join(lines))
    config = settings(tmp_path, path=str(tmp_path / "a.txt"), val_fraction=fraction)
    with pytest.raises(UserError, match=f"a.txt: its text is all held out for validation.*{n}.*data.val_path"):
        prepare(config, TOKENIZER)


@pytest.mark.slow
def test_ten_times_the_text_takes_no_more_memory(tmp_path):
    """The highest that a process of its own holds in preparing it, imports and tokenizer included."""
    peaks = []
    for n in (1, 10):
        file = tmp_path / f"{n}.txt"
        with file.open("w") as stream:
            for i in range(n * 60_000):
                stream.write(f"{i} {'some words of a line ' * (i % 5)}\n")
        config = settings(tmp_path, path=str(file)) | {"seed": 0}
        code = (
            "import json, resource, sys\nfrom lmzoo.data.preparation import prepare\nfrom lmzoo.tokenizer import byte\n"
            "prepare(json.loads(sys.argv[1]), byte((), 512))\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        peaks.append(int(subprocess.check_output([sys.executable, "-c", code, json.dumps(config)])))
    assert file.stat().st_size > 25e6 and peaks[1] < 1.1 * peaks[0]
