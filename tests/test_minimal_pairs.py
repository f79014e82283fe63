"""Minimal pairs: accuracy, over all and by group, from bytes of known probability."""

import pytest

from lmzoo.likelihood.minimal_pairs import MinimalPairs
from spoken import Unigram
from test_questions import write

ROWS = [
    {"sentence_good": "ab", "sentence_bad": "bb", "UID": "x", "field": "syntax"},  # 3 < 4 bits: right
    {"sentence_good": "c", "sentence_bad": "aa", "UID": "x", "field": "syntax"},  # 3 > 2: wrong
    {"sentence_good": "ab", "sentence_bad": "ba", "UID": "y"},  # no preference: wrong
    {"sentence_good": "a", "sentence_bad": "aa", "UID": "y"},  # right
    {"sentence_good": "b", "sentence_bad": "c"},  # right
]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_by_hand(family, tmp_path):
    found = MinimalPairs(batch_size=3)(Unigram("abc", family), write(tmp_path / "a.jsonl", *ROWS))
    assert list(found.items()) == [
        ("accuracy", 3 / 5), ("items", 5), ("UID=x/accuracy", 1 / 2), ("UID=x/items", 2), ("UID=y/accuracy", 1 / 2),
        ("UID=y/items", 2), ("field=syntax/accuracy", 1 / 2), ("field=syntax/items", 2),
    ]  # fmt: skip


def test_other_fields(tmp_path):
    rows = [{"good": "a", "bad": "b", "UID": "x", "kind": 3}, {"good": "b", "bad": "a", "UID": "x", "kind": 4}]
    found = MinimalPairs("good", "bad", groups=["kind"])(Unigram("ab"), write(tmp_path / "a.jsonl", *rows))
    assert found == {"accuracy": 0.5, "items": 2, "kind=3/accuracy": 1, "kind=3/items": 1, "kind=4/accuracy": 0,
                     "kind=4/items": 1}  # fmt: skip
