import hashlib

import pytest

from lmzoo.data import corpus, sources
from lmzoo.data.corpus import Document
from lmzoo.data.sources import Source
from lmzoo.errors import UserError
from small_store import settings

LINES = [f"line {i} of some text" for i in range(400)]
READS = []


def read_carried(path):
    """A reader that brings its own text, as pydoc's does."""
    READS.append(path)
    return map(Document, LINES)


def read_own(path):
    """A user's own reader: a function, whose documents have splits, labels and parts."""
    yield from (Document("a", "x", "train"), Document("b", "x", "val"), Document("c ", None, None, True),
                Document("d", None, "test", True), Document("e"), Document("f", None, "test"))


def read_endless(path):
    yield Document("a", more=True)


def read_strange(path):
    yield Document("a", None, "validation")


def held_out(text, fraction):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6, person=b"split").digest()) < fraction * 2**48


def source(tmp_path, *args, **data):
    return Source(settings(tmp_path, *args, **data)["data"])


@pytest.fixture
def file(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    return tmp_path / "corpus.txt"


def test_a_hash_of_the_text_holds_documents_out(tmp_path, file):
    found = [(split, document.text) for split, document in source(tmp_path, path=str(file)).documents()]
    assert found == [("val" if held_out(line, 0.1) else "train", line) for line in LINES]
    assert 20 <= sum(split == "val" for split, _ in found) <= 65  # 40 expected of 400, standard deviation 6


def test_there_is_always_a_document_to_validate_on(tmp_path, file):
    for n in range(2, 12):
        file.write_text("\n".join(LINES[:n]))
        splits = [split for split, _ in source(tmp_path, path=str(file), val_fraction=0.001).documents()]
        assert splits.count("val") == 1 and splits.count("train") == n - 1
    file.write_text(LINES[0])
    with pytest.raises(UserError, match="corpus.txt holds 1 document, so none can be held out for validation"):
        source(tmp_path, path=str(file)).held_out()
    assert [split for split, _ in source(tmp_path, path=str(file), val_fraction=0).documents()] == ["train"]
    for fraction in (1.5, 1, -0.1):
        with pytest.raises(UserError, match=rf"data.val_fraction={fraction} is not in \[0, 1\)"):
            source(tmp_path, path=str(file), val_fraction=fraction).held_out()


def test_own_files_for_each_split(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    paths = {"path": str(tmp_path / "a.txt"), "val_path": str(tmp_path / "b.txt"), "test_path": str(tmp_path / "c.txt")}
    found = source(tmp_path, **paths)
    assert [(split, document.text) for split, document in found.documents()] == [
        ("train", "a"), ("val", "b"), ("test", "c")]
    assert [(split, document.text) for split, document in found.documents(split="test")] == [("test", "a")]
    paths["val_path"] = str(tmp_path / "none.txt")
    with pytest.raises(UserError, match="data.val_path=.*none.txt matches no file"):
        source(tmp_path, **paths).identity()


def test_sets_that_have_names(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name)
    one, other = ({"x": str(tmp_path / "b.txt"), "a-y": [str(tmp_path / "c.txt")]},
                  {"a-y": [str(tmp_path / "c.txt")], "x": str(tmp_path / "b.txt")})
    found = source(tmp_path, path=str(tmp_path / "a.txt"), val_path=one, test_path={"z": str(tmp_path / "d.txt")})
    assert [(split, document.text) for split, document in found.documents()] == [
        ("train", "a"), ("val/a-y", "c"), ("val/x", "b"), ("test/z", "d")]
    assert list(found.held_out_texts()) == ["c", "b"] and found.held_out() == 0
    same = source(tmp_path, path=str(tmp_path / "a.txt"), val_path=other, test_path={"z": str(tmp_path / "d.txt")})
    assert same.identity() == found.identity()
    exchanged = {"x": one["a-y"], "a-y": one["x"]}
    assert source(tmp_path, path=str(tmp_path / "a.txt"), val_path=exchanged).identity() != found.identity()
    with pytest.raises(UserError, match="data.val_path.x=.*none.txt matches no file"):
        source(tmp_path, path=str(tmp_path / "a.txt"), val_path={"x": str(tmp_path / "none.txt")}).identity()
    with pytest.raises(UserError, match="data.val_path.x: .*a.txt is in data.path too, so it would be trained on"):
        source(tmp_path, path=str(tmp_path / "a.txt"), val_path={"x": str(tmp_path / "a.txt")}).held_out()


def test_splits_of_the_source_itself_and_documents_in_parts(tmp_path):
    found = source(tmp_path, f"{__name__}.read_own", {}, val_fraction=0.0001)
    splits = [split for split, _ in found.documents()]
    assert splits == ["train", "val", "train", "train", "train", "test"]  # the first part decides
    assert [document.text for _, document in found.documents(split="train")] == ["a", "c ", "d", "e"]
    assert [document.text for _, document in found.documents(split="test")] == ["c ", "d", "e", "f"]


@pytest.mark.parametrize(("reader", "message"), [
    ("read_endless", "the last document is said to go on"),
    ("read_strange", "gives a text the split 'validation': it must be train, val, test or none")])
def test_mistakes_of_a_users_reader(tmp_path, reader, message):
    with pytest.raises(UserError, match=message):
        list(source(tmp_path, f"{__name__}.{reader}", {}, val_fraction=0).documents())


def test_text_that_a_reader_carries_is_read_once(tmp_path):
    READS.clear()
    for _ in range(2):
        assert [document.text for _, document in source(tmp_path, f"{__name__}.read_carried", {}).documents()] == LINES
    assert READS == [None]


@pytest.mark.parametrize("hashed_mb", [64, 0])
def test_the_identity_is_that_of_the_text(tmp_path, file, monkeypatch, hashed_mb):
    """Of a small corpus that of its content and the files' names, of a large one that of its files."""
    monkeypatch.setattr(sources, "HASHED_MB", hashed_mb)
    first = source(tmp_path, path=str(file)).identity()
    assert source(tmp_path, path=str(file)).identity() == first
    file.write_text("\n".join(LINES))
    assert (source(tmp_path, path=str(file)).identity() == first) == (hashed_mb > 0)
    file.write_text("\n".join(LINES).replace("line 7 ", "LINE 7 "))  # of the same length
    assert source(tmp_path, path=str(file)).identity() != first


def test_a_file_that_cannot_be_read_is_named(tmp_path, file, monkeypatch):
    found = source(tmp_path, path=str(file))
    assert found.units
    file.unlink()
    with pytest.raises(UserError, match="data.path: .*corpus.txt cannot be read: No such file"):
        found.identity()


def test_parts_are_a_64th_of_the_source_within_bounds(tmp_path, file, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_MB", 0.0001)
    for bounds, n in (((1, 2), 1), ((1e-4, 1), 44), ((1e-4, 1e-4), 87), ((1e-3, 1e-3), 9)):
        monkeypatch.setattr(sources, "PART_MB", bounds)
        parts = source(tmp_path, path=str(file)).parts()
        assert [unit for part in parts for unit in part] == source(tmp_path, path=str(file)).units
        assert len(parts) == n and sum(unit.piece.n_bytes for part in parts for unit in part) == 8689


def test_a_sample_is_of_the_size_asked_and_from_all_over(tmp_path, file):
    everything = list(source(tmp_path, path=str(file)).sample(1))
    assert everything == [line for line in LINES if not held_out(line, 0.1)]
    half = list(source(tmp_path, path=str(file)).sample(0.5 * (400 * 21) / 1e6))
    assert 130 < len(half) < 230 and everything.index(half[-1]) > len(everything) * 0.9
    assert half == list(source(tmp_path, path=str(file)).sample(0.5 * (400 * 21) / 1e6))


@pytest.mark.parametrize("word", ["val_path", "test_path"])
@pytest.mark.parametrize("by_link", [False, True])
def test_text_that_is_measured_is_not_trained_on(tmp_path, word, by_link):
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        (tmp_path / "corpus" / f"{name}.txt").write_text("\n".join(LINES))
    same = tmp_path / ("link.txt" if by_link else "corpus/b.txt")
    if by_link:
        same.symlink_to(tmp_path / "corpus" / "b.txt")
    found = source(tmp_path, path=str(tmp_path / "corpus"), **{word: str(same)})
    for act in (lambda: list(found.documents()), lambda: list(found.sample(1)), found.held_out):
        with pytest.raises(UserError, match=rf"data.{word}: .*{same.name} is in data.path too"):
            act()
    assert len(list(found.documents(split="test"))) == 800  # all of data.path is measured, and nothing else is read


def test_a_files_content_is_read_for_its_identity_once(tmp_path, monkeypatch):
    """Tokenizer and store both ask for it, of thousands of files."""
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    first = source(tmp_path, path=str(tmp_path / "a.txt")).identity()
    monkeypatch.setattr(sources.Path, "read_bytes", None)
    assert source(tmp_path, path=str(tmp_path / "a.txt")).identity() == first
