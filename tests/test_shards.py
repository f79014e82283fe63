import itertools
import json
import pickle

import numpy as np
import pytest

from lmzoo.data.labelled import Document
from lmzoo.data.shardfile import HEADER_SIZE, read_header, width_for
from lmzoo.data.shards import Store, write_meta
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, char
from small_store import Writer

DOCUMENTS = [("train", "ab", "x"), ("val", "中", None), ("train", "", "a"), ("test", "c" * 300, "x"),
             ("train", "abc", "x"), ("train", "b", None)]
TOKENIZER = byte((), 512, sentinels=0)


def written(folder, documents=DOCUMENTS, cuts=(), words=True, labels=None):
    """A store of documents; `cuts` are the numbers of those with which a new part begins."""
    writer = Writer(folder, TOKENIZER, words)
    for number, (split, text, label) in enumerate(documents):
        if number in cuts:
            writer.cut()
        writer.add(split, TOKENIZER.encode_words([text]), [text], [label])
    return writer.finish(labels, 2.5)


def contents(store):
    """All that a store says, read in the plainest way."""
    return {name: {
        "tokens": split.read(0, split.n_tokens).tolist(), "spans": [split.span(i) for i in range(split.n_documents)],
        "labels": [split.label(i) for i in range(split.n_documents)], "n_bytes": split.n_bytes,
        "n_unlabelled": split.n_unlabelled, "names": split.labels, "lengths": [*itertools.chain(*split.lengths())],
        "documents": split.documents_at(0, split.n_tokens).tolist(),
        "words": split.word_starts(0, split.n_tokens).tolist() if split.has_words else None,
    } for name, split in ((name, store[name]) for name in store.splits)}


def test_documents_come_back(tmp_path):
    store = written(tmp_path)
    store.verify()
    store.require(TOKENIZER)
    assert store.splits == ["train", "val", "test"] and store.labels == ["a", "x"] and store.xz_bits_per_byte == 2.5
    bos, eos, a, b, c = TOKENIZER.bos, TOKENIZER.eos, *map(TOKENIZER.id, "abc")
    assert contents(store)["train"] == {
        "tokens": [bos, a, b, eos, bos, eos, bos, a, b, c, eos, bos, b, eos],
        "spans": [(0, 4), (4, 6), (6, 11), (11, 14)], "lengths": [4, 2, 5, 3], "labels": [1, 0, 1, None],
        "names": ["a", "x"], "n_bytes": 6, "n_unlabelled": 1,
        "documents": [0] * 4 + [1] * 2 + [2] * 5 + [3] * 3, "words": [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]}
    assert store["val"].n_bytes == 3 and store["val"].label(0) is None  # bytes, not characters
    assert store["train"].read(4, 6).dtype == store["train"].documents_at(4, 6).dtype == np.int64
    assert store["train"].word_starts(4, 6).dtype == bool


@pytest.mark.parametrize("cuts", [(1,), (3, 5), range(6), (2, 2)])
def test_shards_are_one_stream(tmp_path, cuts):
    whole, cut = written(tmp_path / "whole"), written(tmp_path / "cut", cuts=cuts)
    assert contents(cut) == contents(whole) and len(list((tmp_path / "cut").iterdir())) > 4
    split, tokens = cut["train"], np.array(contents(whole)["train"]["tokens"])
    documents = np.array(contents(whole)["train"]["documents"])
    for begin, end in itertools.combinations_with_replacement(range(len(tokens) + 3), 2):
        assert split.read(begin, end).tolist() == tokens[begin:end].tolist()
        assert split.documents_at(begin, end).tolist() == documents[begin:end].tolist()
        assert len(split.word_starts(begin, end)) == len(tokens[begin:end])
    assert [len(some) for some in split.lengths(at_a_time=1)] == [1] * 4


def test_a_document_in_parts_is_one_document(tmp_path):
    texts, more = ["ab", " c", "中d", "e"], [True, True, False, False]
    whole, parts = Writer(tmp_path / "whole", TOKENIZER, words=True), Writer(tmp_path / "parts", TOKENIZER, words=True)
    joined = ["ab c中d", "e"]
    whole.add("train", TOKENIZER.encode_words(joined), joined, ["x", "y"])
    for text, goes_on in zip(texts, more, strict=True):
        parts.add("train", TOKENIZER.encode_words([text]), [text], ["y" if text == "e" else "x"], [goes_on])
    assert contents(parts.finish()) == contents(whole.finish())


def test_a_shard_without_a_token(tmp_path):
    bare = char("ab", 512)
    bare.bos = bare.eos = None
    writer = Writer(tmp_path, bare)
    for text in ("", "ab", ""):
        writer.add("train", bare.encode_words([text]), [text], [None])
        writer.cut()
    store = writer.finish()
    assert [store["train"].span(i) for i in range(3)] == [(0, 0), (0, 2), (2, 2)]
    assert store["train"].documents_at(0, 2).tolist() == [1, 1]
    assert store["train"].read(0, 9).tolist() == bare.encode("ab")


def test_labels_can_be_given(tmp_path):
    store = written(tmp_path, cuts=(2, 4), labels=["x", "never seen", "a"])
    assert store.labels == ["x", "never seen", "a"] and contents(store)["train"]["labels"] == [0, 2, 0, None]
    assert store["train"].labels == ["x", "a"] and store["test"].labels == ["x"] and store["val"].labels == []


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
        assert writer.finish()["train"].read(1, 1 + len(ids)).tolist() == ids
        assert read_header(folder / "train-00000.shard").width == int(folder.name)


def test_a_store_of_another_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="was made with tokenizer"):
        written(tmp_path).require(char("abc", 512))


def test_every_byte_of_a_header_is_watched(tmp_path):
    written(tmp_path, cuts=(3,))
    file = tmp_path / "train-00001.shard"
    whole = file.read_bytes()
    for place in range(HEADER_SIZE):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1:])
        with pytest.raises(UserError, match="train-00001.shard (is not a shard|has version|is damaged)"):
            Store(tmp_path)["train"].read(0, 100)
        Store(tmp_path)["train"].read(0, 4)  # of the other shard, which is whole


def test_every_byte_of_a_body_is_watched_by_verify(tmp_path):
    written(tmp_path, cuts=(3,))
    file = tmp_path / "train-00001.shard"
    whole = file.read_bytes()
    for place in range(HEADER_SIZE, len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        with pytest.raises(UserError, match=r"train-00001.shard is damaged \(sha256\): delete the folder"):
            Store(tmp_path).verify()
    file.write_bytes(whole)
    Store(tmp_path).verify()


def test_files_that_are_no_shards_of_this_store_are_refused(tmp_path):
    written(tmp_path / "a", cuts=(3,))
    other = Writer(tmp_path / "b", char("abc", 512))
    other.add("train", [([5, 6], None)], ["ab"], [None])
    other.finish()
    file = tmp_path / "a" / "train-00001.shard"
    whole = file.read_bytes()
    for content, message in (
        (b"PK" + whole[2:], "is not a shard of lmzoo"), (whole[:40], "is not a shard"), (b"", "is not a shard"),
        (whole[:-1], "another size"), (whole + b"\0", "another size"),
        (whole[:8] + b"\x09" + whole[9:], "has version 9, this lmzoo reads version 3"),
        ((tmp_path / "b" / "train-00000.shard").read_bytes(), "was made with another tokenizer"),
        ((tmp_path / "a" / "val-00000.shard").read_bytes(), "is not the shard that meta.json"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            Store(tmp_path / "a")["train"].span(3)
        with pytest.raises(UserError, match=message):
            Store(tmp_path / "a").verify(bodies=False)
    file.unlink()
    with pytest.raises(UserError, match="train-00001.shard cannot be read .*No such file"):
        Store(tmp_path / "a")["train"].label(3)


def test_meta_that_was_changed_by_hand_is_refused(tmp_path):
    written(tmp_path)
    file = tmp_path / "meta.json"
    text = file.read_text()
    for content in (text.replace('"a"', '"b"', 1), text[:-20], "", "[]", "3", "{}", text.replace("true", "1")):
        assert content != text
        file.write_text(content)
        with pytest.raises(UserError, match="meta.json .*delete the folder, it is prepared again"):
            Store(tmp_path)
    file.write_text(json.dumps(json.loads(text)))  # other white space says the same
    Store(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="meta.json is not what lmzoo wrote"):
        Store(tmp_path)


def test_a_shard_is_opened_when_it_is_read(tmp_path):
    store = written(tmp_path, cuts=range(6))
    for file in tmp_path.glob("train-*.shard"):
        if file.name != "train-00002.shard":
            file.unlink()
    assert store["train"].read(7, 10).tolist() == TOKENIZER.encode("abc") and store["train"].n_tokens == 14


def test_an_open_shard_is_the_file_itself(tmp_path):
    """Mapped and not read: what is changed in the file is seen."""
    store = written(tmp_path)
    before = store["train"].read(0, 4).tolist()
    file = next(tmp_path.glob("train-*.shard"))
    with file.open("r+b") as stream:
        stream.seek(HEADER_SIZE)
        stream.write(bytes(2))
    assert store["train"].read(0, 4).tolist() == [0, *before[1:]]


def test_pickle_carries_paths_not_tokens(tmp_path):
    writer = Writer(tmp_path, TOKENIZER)
    writer.add("train", [([7] * 100_000, None)], ["x" * 100_000], ["label"])
    store = writer.finish()
    for thing in (store, store["train"]):
        assert len(pickle.dumps(thing)) < 1000
    assert contents(pickle.loads(pickle.dumps(store))) == contents(store)
    assert pickle.loads(pickle.dumps(store["train"])).read(0, 10).tolist() == store["train"].read(0, 10).tolist()
    assert HEADER_SIZE == 64


def test_meta_is_written_whole(tmp_path):
    write_meta(tmp_path / "meta.json", {"a": 1})
    assert [file.name for file in tmp_path.iterdir()] == ["meta.json"]


CLOSED = TOKENIZER.eos
LABELLED = {  # kind: (documents, how their texts are encoded, what each document's label, second and row of tags are)
    "class": ([Document("a", "x"), Document("b", "y", second="cd"), Document("a")],
              [(1, 0, None), (2, 3, None), (None, 0, None)], ["x", "y"]),
    "classes": ([Document("a", ("z", "x")), Document("b", ()), Document("c", ("y",)), Document("d")],
                [([1, 3], 0, None), ([], 0, None), ([2], 0, None), (None, 0, None)], ["x", "y", "z"]),
    "number": ([Document("a", 0.1), Document("ab", -3, second="c"), Document("c")],
               [(0.1, 0, None), (-3.0, 4, None), (None, 0, None)], []),
    "text": ([Document("ab", second="c"), Document("", second="d"), Document("e")],
             [(None, 4, None), (None, 2, None), (None, 0, None)], []),
    "tags": ([Document("ab c", ("B", "O"), words=("ab", "c")), Document("d", ("A",), words=("d",))],
             [(None, 0, [-100, 2, -100, -100, 3, -100]), (None, 0, [-100, 1, -100])], ["A", "B", "O"]),
}  # fmt: skip


@pytest.mark.parametrize("n_cuts", [0, 1, 9])
@pytest.mark.parametrize("kind", LABELLED)
def test_labels_come_back(tmp_path, kind, n_cuts):
    """Numbered among labels of which the first does not occur here."""
    documents, expected, names = LABELLED[kind]
    writer = Writer(tmp_path, TOKENIZER, kind=kind)
    for number, document in enumerate(documents):
        texts = list(document.texts)
        encoded = TOKENIZER.encode_firsts([document.words]) if kind == "tags" else TOKENIZER.encode_words(texts)
        writer.add_documents("train", encoded, [document])
        if number < n_cuts:
            writer.cut()
    store = writer.finish(["?", *names] if names else None)
    split = pickle.loads(pickle.dumps(store["train"]))
    store.verify()
    assert store.kind == split.kind == kind and split.labels == names
    assert split.n_unlabelled == [label is None and (kind != "text" or not second) and kind != "tags"
                                  for label, second, _ in expected].count(True)
    for number, (label, second, tags) in enumerate(expected):
        assert split.label(number) == label and type(split.label(number)) is type(label)
        assert split.second(number) == second
        begin, end = split.span(number)
        text = [*TOKENIZER.encode(documents[number].text), CLOSED]
        if second:
            assert split.read(begin + second, end).tolist() == [*TOKENIZER.encode(documents[number].second), CLOSED]
            end = begin + second
        assert split.read(begin, end).tolist() == [TOKENIZER.bos, *text]
        if tags:
            assert split.tags(begin, end).tolist() == tags and split.tags(begin + 1, end).tolist() == tags[1:]
    assert split.n_bytes == sum(document.n_bytes for document in documents)


def test_other_labels_give_other_numbers(tmp_path):
    writer = Writer(tmp_path, TOKENIZER, kind="classes")
    writer.add_documents("train", TOKENIZER.encode_words(["a"]), [Document("a", ("x", "y"))])
    writer.finish()
    wider = Store(tmp_path, ["w", "y", "x"])
    for store in (wider, pickle.loads(pickle.dumps(wider))):
        assert store.labels == ["w", "y", "x"] and store["train"].label(0) == [1, 2]
    assert pickle.loads(pickle.dumps(wider["train"])).label(0) == [1, 2]


def test_a_store_without_labels_has_no_room_for_them(tmp_path):
    sizes = {}
    for kind in (None, "class", "number", "tags"):
        writer = Writer(tmp_path / str(kind), TOKENIZER, kind=kind)
        document = Document("ab", None if kind != "tags" else ("O",), words=("ab",))
        encoded = TOKENIZER.encode_firsts([("ab",)])
        writer.add_documents("train", encoded, [document])
        writer.finish()
        sizes[kind] = (tmp_path / str(kind) / "train-00000.shard").stat().st_size
    assert sizes == {None: HEADER_SIZE + 8 + 8 + 8 + 4, "class": sizes[None] + 4, "number": sizes[None] + 12,
                     "tags": sizes[None] + 2 * 4}


def test_too_many_tags(tmp_path):
    n = (1 << 15) + 1
    words = tuple("a" * n)
    writer = Writer(tmp_path, TOKENIZER, kind="tags")
    with pytest.raises(UserError, match="more than 32,768 tags: is data.tags_column the column of the tags?"):
        writer.add_documents("train", TOKENIZER.encode_firsts([words]),
                             [Document("a", tuple(map(str, range(n))), words=words)])
