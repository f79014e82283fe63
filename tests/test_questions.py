"""Questions in JSON lines: every mistake by its row, before any is put to the net."""

import json

import pytest

from lmzoo.errors import UserError
from lmzoo.likelihood.minimal_pairs import MinimalPairs
from lmzoo.likelihood.multiple_choice import MultipleChoice
from lmzoo.likelihood.pairs import Pair
from lmzoo.likelihood.questions import Question, answered, records
from lmzoo.tokenizer import train_wordpiece
from spoken import Unigram, net


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_records_and_where_they_stand(tmp_path):
    file = write(tmp_path / "a.jsonl", {"a": 1}, "", {"b": "°C"})
    assert list(records(file)) == [(f"{file} line 1", {"a": 1}), (f"{file} line 3", {"b": "°C"})]


GOOD = {"question": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize("row, line", [
    ("{", "not JSON"), ("[1]", "not a JSON object but a list"),
    ({**GOOD, "choices": ["b", "\ud83d"]}, "the line holds half of a surrogate pair"),
    ({**GOOD, "question": 3}, "the field question should be a text, not 3"),
    ({**GOOD, "question": " "}, "the field question should be a text, not ' '"),
    ({"choices": ["b", "c"], "answer": 1}, "no field question; the fields are choices, answer"),
    ({**GOOD, "choices": "bc"}, "the field choices should be a list of texts, not 'bc'"),
    ({**GOOD, "choices": ["b", ""]}, "the field choices should be a list of texts"),
    ({**GOOD, "choices": ["b", "c", "b"]}, "'b' is there twice, and equal texts are equally likely: leave the item"),
    ({**GOOD, "choices": ["b"]}, "1 choices leave nothing to choose"),
    *(({**GOOD, "answer": answer}, "the field answer should be the number of the right choice, from 0 to 1, not")
      for answer in (2, -1, "1", True, 1.0, None)),
    ({**GOOD, "choices": ["b", "c" * 70]}, "'c.*' has 71 tokens, more than the 32 positions"),
])  # fmt: skip
def test_a_mistake_is_told_by_its_row_before_long_work(row, line, tmp_path, monkeypatch):
    file = write(tmp_path / "a.jsonl", GOOD, row, GOOD)
    monkeypatch.setattr("lmzoo.likelihood.scoring.read", lambda *_: pytest.fail("a net was asked"))
    with pytest.raises(UserError, match=f"a.jsonl line 2: {line}"):
        MultipleChoice()(net("gpt"), file)


@pytest.mark.parametrize("lines, line", [(("", " "), "holds no questions"), ((), "is empty")])
def test_a_file_without_questions(lines, line, tmp_path):
    with pytest.raises(UserError, match=line):
        MinimalPairs()(net("gpt"), write(tmp_path / "a.jsonl", *lines))


@pytest.mark.parametrize("row, line", [
    ({"sentence_good": "a"}, "no field sentence_bad"),
    ({"sentence_good": "a", "sentence_bad": "a"}, "'a' is there twice"),
])  # fmt: skip
def test_a_pair_that_is_none(row, line, tmp_path):
    with pytest.raises(UserError, match=f"a.jsonl line 1: {line}"):
        MinimalPairs()(net("gpt"), write(tmp_path / "a.jsonl", row))


def test_what_is_not_known_is_said(caplog):
    tokenizer = train_wordpiece(["the cat"] * 9, 20)
    list(answered(net("gpt", tokenizer), lambda: iter([Question("", [Pair("the", "cat"), Pair("", "q")], 0)]), 2))
    assert caplog.messages == ["1 of 1 items hold signs or words for which the tokenizer has no token"]


def test_what_is_cut_is_said(caplog):
    """An item is cut once, however many of its answers are too long."""
    questions = [Question("here", [Pair("x" * n, "a"), Pair("x" * n, "b"), Pair("x", "a")], 0) for n in (40, 40, 1)]
    found = list(answered(Unigram("abx", max_len=16), lambda: iter(questions), 2))
    assert [question for question, _ in found] == questions
    assert caplog.messages == ["2 of 3 items are longer than the 16 positions of the model, which reads only their end"]
