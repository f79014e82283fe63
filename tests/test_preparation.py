import lzma
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lmzoo.data import preparation
from lmzoo.data.corpus import Document
from lmzoo.data.preparation import documents, prepare, prepare_tokenizer, sample
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte

TOKENIZER = byte((), 512)
LINES = [f"line {i} of some text" for i in range(400)]
READS = []


def carried(path):
    """A reader that brings its own text, as pydoc's does."""
    READS.append(path)
    return map(Document, LINES)


def settings(tmp_path, target="lmzoo.data.corpus.read_text", reader=None, **data):
    paths = {"path": None, "val_path": None, "test_path": None, "cache_dir": str(tmp_path / "cache")}
    data = paths | {"val_fraction": 0.1} | data
    reader = {"_target_": target, "_partial_": True} | ({"split": "line"} if reader is None else reader)
    kind = {"_target_": "lmzoo.tokenizer.char", "_partial_": True}
    return {"data": data | {"reader": reader}, "tokenizer": {"kind": kind, "vocab_size": 512, "sample_mb": 64}}


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    return settings(tmp_path, path=str(tmp_path / "corpus.txt"))


def decoded(store):
    return {name: [TOKENIZER.decode(store[name].read(*store[name].span(i))) for i in range(store[name].n_documents)]
            for name in store.splits}


def test_each_document_is_in_one_split(corpus):
    texts = decoded(prepare(corpus, TOKENIZER))
    assert sorted(texts["train"] + texts["val"]) == sorted(LINES)
    assert 20 <= len(texts["val"]) <= 65  # 40 expected of 400, standard deviation 6
    assert [text for text in LINES if text in texts["val"]] == texts["val"]


def test_the_split_of_a_document_depends_on_its_text_alone(tmp_path, corpus):
    before = set(decoded(prepare(corpus, TOKENIZER))["val"])
    (tmp_path / "other.txt").write_text("\n".join(["new first line", *reversed(LINES)]))
    after = set(decoded(prepare(settings(tmp_path, path=str(tmp_path / "other.txt")), TOKENIZER))["val"])
    assert before == after - {"new first line"}


def test_there_is_always_a_document_to_validate_on(tmp_path):
    for n in range(2, 12):
        (tmp_path / "few.txt").write_text("\n".join(LINES[:n]))
        texts = decoded(prepare(settings(tmp_path, path=str(tmp_path / "few.txt"), val_fraction=0.001), TOKENIZER))
        assert len(texts["val"]) == 1 and len(texts["train"]) == n - 1
    (tmp_path / "one.txt").write_text(LINES[0])
    with pytest.raises(UserError, match="one.txt holds 1 document, so none can be held out for validation"):
        prepare(settings(tmp_path, path=str(tmp_path / "one.txt")), TOKENIZER)
    assert prepare(settings(tmp_path, path=str(tmp_path / "one.txt"), val_fraction=0), TOKENIZER).splits == ["train"]
    with pytest.raises(UserError, match=r"data.val_fraction=1.5 is not in \[0, 1\)"):
        prepare(settings(tmp_path, path=str(tmp_path / "one.txt"), val_fraction=1.5), TOKENIZER)


def test_own_files_for_each_split(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    paths = {"path": str(tmp_path / "a.txt"), "val_path": str(tmp_path / "b.txt"), "test_path": str(tmp_path / "c.txt")}
    assert decoded(prepare(settings(tmp_path, **paths), TOKENIZER)) == {"train": ["a"], "val": ["b"], "test": ["c"]}
    assert decoded(prepare(settings(tmp_path, **paths), TOKENIZER, split="test")) == {"test": ["a"]}
    paths["val_path"] = str(tmp_path / "none.txt")
    with pytest.raises(UserError, match="data.val_path=.*none.txt matches no file"):
        prepare(settings(tmp_path, **paths), TOKENIZER)


def test_classes_of_a_trained_model(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nfine,good\nawful,bad\n")
    config = settings(tmp_path, "lmzoo.data.corpus.read_csv", {}, path=str(tmp_path / "a.csv"))
    store = prepare(config, TOKENIZER, split="test", labels=["worse", "good", "bad"])
    assert [store["test"].label(i) for i in range(2)] == [1, 2] and store.labels == ["worse", "good", "bad"]
    with pytest.raises(UserError, match="document 2 has the label 'bad'; the model knows good, best"):
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


def test_a_prepared_corpus_is_not_prepared_again_until_something_changes(tmp_path, corpus, monkeypatch):
    first = prepare(corpus, TOKENIZER).folder
    built = []
    build = preparation._build
    monkeypatch.setattr(preparation, "_build", lambda *args: built.append(args) or build(*args))
    assert prepare(corpus, TOKENIZER).folder == first and not built
    assert prepare(corpus, byte((), 512, sentinels=1)).folder != first  # another tokenizer
    assert prepare(corpus | {"task": {"whole_word": True}}, TOKENIZER)["train"].words is not None
    changed = (tmp_path / "corpus.txt").read_text().replace("line 7 ", "LINE 7 ")  # of the same length
    (tmp_path / "corpus.txt").write_text(changed)
    texts = decoded(prepare(corpus, TOKENIZER))
    assert "LINE 7 of some text" in texts["train"] + texts["val"] and len(built) == 3


def test_a_killed_preparation_goes_on(corpus, monkeypatch):
    elsewhere = corpus["data"] | {"cache_dir": corpus["data"]["cache_dir"] + "2"}
    whole = decoded(prepare(corpus | {"data": elsewhere}, TOKENIZER))
    monkeypatch.setattr(preparation, "BATCH_MB", 0.001)
    encode, seen = TOKENIZER.encode_batch, []

    def killed(texts):
        if len(seen) > 150:
            raise KeyboardInterrupt
        seen.extend(texts)
        return encode(texts)

    monkeypatch.setattr(TOKENIZER, "encode_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, TOKENIZER)
    before = list(seen)
    monkeypatch.setattr(TOKENIZER, "encode_batch", lambda texts: seen.extend(texts) or encode(texts))
    store = prepare(corpus, TOKENIZER)
    store.verify()
    assert decoded(store) == whole
    assert len(seen) < len(LINES) + 100 and len(before) > 150  # the committed batches were not tokenised again
    assert [file.name for file in store.folder.parent.iterdir() if "partial" in file.name] == []


def test_two_processes_prepare_once(tmp_path, corpus):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_preparation import *
from lmzoo.data import preparation
build = preparation._build
preparation._build = lambda *args: print("built") or build(*args)
print(prepare({corpus!r}, TOKENIZER).folder.name)
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = sorted(run.communicate()[0].split() for run in runs)
    assert all(run.returncode == 0 for run in runs)
    assert sorted(map(len, out)) == [1, 2] and out[0][-1] == out[1][-1]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, corpus):
    (tmp_path / "file").touch()
    corpus["data"]["cache_dir"] = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match="cannot prepare .*data.cache_dir"):
        prepare(corpus, TOKENIZER)


def test_a_full_disk_is_named_and_harmless(corpus):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match="cannot prepare .*File too large"):
            prepare(corpus, TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    texts = decoded(prepare(corpus, TOKENIZER))
    assert sorted(texts["train"] + texts["val"]) == sorted(LINES)


def test_bad_text_leaves_nothing_behind(tmp_path, corpus):
    (tmp_path / "corpus.txt").write_bytes("\n".join(LINES).encode() + b"\n\xff")
    with pytest.raises(UserError, match="corpus.txt is not UTF-8: byte 0xff at offset"):
        prepare(corpus, TOKENIZER)
    assert not [path for path in (tmp_path / "cache" / "stores").iterdir() if path.is_dir()]


def test_a_file_that_grows_meanwhile_is_refused(tmp_path, corpus, monkeypatch):
    build = preparation._build

    def grow(*args):
        build(*args)
        with (tmp_path / "corpus.txt").open("a") as stream:
            stream.write("\none more")

    monkeypatch.setattr(preparation, "_build", grow)
    with pytest.raises(UserError, match="changed while it was being prepared"):
        prepare(corpus, TOKENIZER)


def test_a_sample_is_of_the_size_asked_and_from_all_over(corpus):
    everything = list(sample(corpus["data"], 1))
    assert everything == [document.text for split, document in documents(corpus["data"]) if split == "train"]
    half = list(sample(corpus["data"], 0.5 * (400 * 21) / 1e6))
    assert 130 < len(half) < 230 and everything.index(half[-1]) > len(everything) * 0.9


def test_a_tokenizer_is_trained_once_on_training_text(tmp_path, corpus, monkeypatch):
    (tmp_path / "val.txt").write_text("zzz")
    corpus["data"]["val_path"] = str(tmp_path / "val.txt")
    first = prepare_tokenizer(corpus)
    assert first.id("l") is not None and first.id("z") is None
    monkeypatch.setattr(preparation.tokenizers, "prepare", None)
    assert prepare_tokenizer(corpus).hash == first.hash


def test_text_that_a_reader_carries_is_read_once(tmp_path):
    config = settings(tmp_path, f"{__name__}.carried", {})
    READS.clear()
    tokenizer = prepare_tokenizer(config)
    store = prepare(config, tokenizer)
    assert READS == [None] and store["train"].n_documents + store["val"].n_documents == len(LINES)
