import hashlib

import numpy as np
import pytest

from lmzoo.data import duplicates
from lmzoo.data.corpus import Document
from lmzoo.data.duplicates import count, digests, mark, verify, without, write
from lmzoo.errors import UserError


def found(texts):
    return [("train", Document(text)) for text in texts]


@pytest.mark.parametrize("bucket_mb", [32, 0.001])
@pytest.mark.parametrize("at_a_time", [1, 7, 1 << 18])
def test_the_first_of_equal_texts_is_marked(tmp_path, monkeypatch, bucket_mb, at_a_time):
    monkeypatch.setattr(duplicates, "BUCKET_MB", bucket_mb)
    monkeypatch.setattr(duplicates, "AT_A_TIME", at_a_time)
    draw = np.random.default_rng(0)
    parts = [[str(number) for number in draw.integers(0, 60, n)] for n in (100, 0, 1, 250)]
    files = [tmp_path / f"{number}.digests" for number in range(len(parts))]
    for file, texts in zip(files, parts, strict=True):
        write(file, found(texts))
    assert list(map(count, files)) == [100, 0, 1, 250]
    mark(files, tmp_path / "first")
    seen, expected = set(), []
    for text in sum(parts, []):
        expected.append(text not in seen)
        seen.add(text)
    assert np.fromfile(tmp_path / "first", "u1").tolist() == expected
    assert {file.name for file in tmp_path.iterdir()} == {"first", *(file.name for file in files)}


def test_pairs_are_equal_in_both_texts(tmp_path):
    pairs = [("a", "b"), ("a", "c"), ("b", "a"), ("a", "b"), ("ab", ""), ("a", None)]
    write(tmp_path / "a", [("train", Document(text, label, second=second))
                           for label, (text, second) in zip("xxxyxx", pairs, strict=True)])
    mark([tmp_path / "a"], tmp_path / "first")
    assert list((tmp_path / "first").read_bytes()) == [1, 1, 1, 0, 1, 1]


def test_nothing_to_mark(tmp_path):
    write(tmp_path / "a", [])
    mark([tmp_path / "a"], tmp_path / "first")
    assert (tmp_path / "first").read_bytes() == b""


@pytest.mark.parametrize("place", [0, 15, 16, 47])
def test_a_damaged_file_of_digests_is_known(tmp_path, place):
    write(tmp_path / "a", found(["x", "y"]))
    verify(tmp_path / "a")
    content = bytearray((tmp_path / "a").read_bytes())
    content[place] ^= 1
    for damaged in (content, content[:place], content[:32]):
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(UserError, match="a is damaged"):
            verify(tmp_path / "a")


def test_a_digest_is_of_the_whole_text():
    parts = [Document("ab", more=True), Document(" 中", more=True), Document(""), Document("ab 中", "label", "val"),
             Document("")]
    one, two, three = digests(("train", part) for part in parts)
    assert one == two == hashlib.blake2b("ab 中".encode(), digest_size=16).digest() and three != one


def test_documents_are_left_out_with_all_their_parts():
    documents = [("train", document) for document in (
        Document("a", more=True), Document("b"), Document("中", more=True), Document("c"), Document("d"))]
    left_out = {"documents": 0, "bytes": 0}
    kept = without(documents, np.array([1, 0, 1]), left_out)
    assert [document.text for _, document in kept] == ["a", "b", "d"] and left_out == {"documents": 1, "bytes": 4}
    assert list(without(documents, None, left_out)) == documents
