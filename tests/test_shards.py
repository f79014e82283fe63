import pickle

import numpy as np
import pytest

from lmzoo.data.shards import HEADER, Store, Writer, width_for
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, char

DOCUMENTS = [("train", "ab", "x"), ("val", "中", None), ("train", "", "a"), ("test", "c" * 300, "x"),
             ("train", "abc", "x")]
TOKENIZER = byte((), 512, sentinels=0)


def feed(writer, documents, commit_each=False):
    for number, (split, text, label) in enumerate(documents, 1):
        writer.add(split, TOKENIZER.encode_words([text]), [text], [label])
        if commit_each:
            writer.commit(number)
    return writer


def contents(store):
    return {name: (store[name].read(0, store[name].n_tokens).tolist(), store[name].ends.tolist(), store[name].n_bytes,
                   [store[name].label(i) for i in range(store[name].n_documents)],
                   None if store[name].words is None else store[name].words.tolist()) for name in store.splits}


def test_documents_come_back(tmp_path):
    feed(Writer(tmp_path, TOKENIZER, words=True), DOCUMENTS).finish(None, 2.5)
    store = Store(tmp_path)
    store.verify()
    store.require(TOKENIZER)
    assert store.splits == ["train", "val", "test"] and store.labels == ["a", "x"] and store.xz_bits_per_byte == 2.5
    bos, eos, a, b, c = TOKENIZER.bos, TOKENIZER.eos, *map(TOKENIZER.id, "abc")
    assert contents(store)["train"] == (
        [bos, a, b, eos, bos, eos, bos, a, b, c, eos], [4, 6, 11], 5, [1, 0, 1], [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1])
    assert store["val"].n_bytes == 3 and contents(store)["val"][3] == [None]  # bytes, not characters
    assert [store["train"].span(i) for i in range(3)] == [(0, 4), (4, 6), (6, 11)]
    assert store["train"].read(4, 6).dtype == np.int64


def test_labels_can_be_given(tmp_path):
    feed(Writer(tmp_path, TOKENIZER), DOCUMENTS).finish(["x", "never seen", "a"], None)
    assert Store(tmp_path).labels == ["x", "never seen", "a"] and contents(Store(tmp_path))["train"][3] == [0, 2, 0]


def test_width_follows_the_vocabulary():
    assert [width_for(n) for n in (2, 65536, 65537, 10**6)] == [2, 2, 4, 4]


def test_wide_ids_come_back(tmp_path):
    wide = char((chr(0x4E00 + i) for i in range(20_000)), 10**6)
    big = char([*map(chr, range(0x4E00, 0x9FFF)), *map(chr, range(0x20000, 0x2FFFF))], 10**6)
    assert len(wide) < 65536 < len(big)
    for folder, tokenizer in ((tmp_path / "2", wide), (tmp_path / "4", big)):
        ids = tokenizer.encode(chr(0x4E00 + 19_999) + (chr(0x2FFF0) if tokenizer is big else ""))
        writer = Writer(folder, tokenizer)
        writer.add("train", [(ids, None)], ["?"], [None])
        writer.finish(None, None)
        assert Store(folder)["train"].read(1, 1 + len(ids)).tolist() == ids


@pytest.mark.parametrize("killed_after", range(len(DOCUMENTS)))
def test_writing_goes_on_after_the_last_commit(tmp_path, killed_after):
    feed(Writer(tmp_path / "whole", TOKENIZER, words=True), DOCUMENTS).finish(None, None)
    first = feed(Writer(tmp_path / "torn", TOKENIZER, words=True), DOCUMENTS[:killed_after], commit_each=True)
    feed(first, [("train", "never committed", "lost"), ("test", "nor this", None)])
    for file in first._files.values():  # a kill: what was written stays, nothing is finished
        file.flush()
    second = Writer(tmp_path / "torn", TOKENIZER, words=True)
    assert second.done == killed_after
    feed(second, DOCUMENTS[killed_after:]).finish(None, None)
    assert contents(Store(tmp_path / "torn")) == contents(Store(tmp_path / "whole"))
    Store(tmp_path / "torn").verify()
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in ("torn", "whole")]
    assert names[0] == names[1]


def test_what_does_not_fit_is_refused(tmp_path):
    feed(Writer(tmp_path, TOKENIZER), DOCUMENTS).finish(None, None)
    with pytest.raises(UserError, match="was made with tokenizer"):
        Store(tmp_path).require(char("abc", 512))
    file = tmp_path / "train.tokens"
    whole = file.read_bytes()
    for content, message in (
        (b"PK" + whole[2:], "is not a token file"), (whole[:40], "is not a token file"), (whole[:-1], "another size"),
        (whole + b"\0", "another size"), (whole[:8] + b"\x09" + whole[9:], "has version 9, this lmzoo reads version 1"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            Store(tmp_path)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one flipped bit in the body
    with pytest.raises(UserError, match="train.tokens is damaged"):
        Store(tmp_path).verify()


def test_pickle_carries_paths_not_tokens(tmp_path):
    writer = Writer(tmp_path, TOKENIZER)
    writer.add("train", [([7] * 100_000, None)], ["x" * 100_000], ["label"])
    writer.finish(None, None)
    store = Store(tmp_path)
    for thing in (store, store["train"]):
        assert len(pickle.dumps(thing)) < 1000
    assert contents(pickle.loads(pickle.dumps(store))) == contents(store)
    assert HEADER.size == 64
