"""Classification by the likelihood of labels: which prompts are made, which examples drawn, and who is right."""

import pytest

from lmzoo.data.labelled import Document
from lmzoo.errors import UserError
from lmzoo.likelihood import questions
from lmzoo.likelihood.labels import Labelled, Labels
from spoken import Unigram

TRAIN = [Document(f"t{n}", "ab"[n % 2]) for n in range(9)] + [Document("none")]
TEST = [Document("x", "a"), Document("y", "b"), Document("z", "a"), Document("none")]
TEXTS = Labelled(lambda: iter(TEST), lambda: iter(TRAIN))


@pytest.fixture
def asked(monkeypatch):
    """The pairs that are put to the net."""
    found, usual = [], questions.likelihoods
    monkeypatch.setattr(
        questions, "likelihoods", lambda net, pairs, n: usual(net, (found.append(pair) or pair for pair in pairs), n)
    )
    return found


def test_the_likelier_word(asked, caplog):
    """a is the likelier of a and b, b of the words that they are given here."""
    assert Labels()(Unigram("ab"), TEXTS) == {"accuracy": 2 / 3, "items": 3}
    assert caplog.messages == ["1 texts have no label and are left out"]
    assert Labels(words={"a": "bad"})(Unigram("ab"), TEXTS) == {"accuracy": 1 / 3, "items": 3}
    assert [tuple(pair) for pair in asked[:4]] == [("x", "a", " "), ("x", "b", " "), ("y", "a", " "), ("y", "b", " ")]
    assert [tuple(pair) for pair in asked[6:8]] == [("x", "bad", " "), ("x", "b", " ")]


def test_examples_stand_before_each_text_alike(asked):
    measure = Labels(3, seed=5, template="<{}>", between=":", separator="|", words={"a": "A", "b": "B"})
    measure(Unigram("abAB"), TEXTS)
    before = {pair.before.rpartition("|")[0] for pair in asked}
    assert len(before) == 1 and [pair.before.rpartition("|")[2] for pair in asked[::2]] == ["<x>", "<y>", "<z>"]
    shots = before.pop().split("|")
    valid = {f"<t{n}>:{'AB'[n % 2]}" for n in range(9)}
    assert len(set(shots)) == 3 and set(shots) <= valid

    def drawn(seed):
        return [document.text for document in Labels(3, seed).shots(TEXTS.train)]

    assert drawn(5) == [shot[1:3] for shot in shots] == drawn(5) and len({tuple(drawn(seed)) for seed in range(9)}) > 5
    assert sorted(document.text for document in Labels(9).shots(TEXTS.train)) == [f"t{n}" for n in range(9)]


@pytest.mark.parametrize("words, texts, line", [
    ({"n_shots": 10}, TEXTS, "measure.n_shots=10: the train split has 9 texts with a label"),
    ({"words": {"c": "x"}}, TEXTS, "measure.words.c: no text has this label; the labels are a, b"),
    ({"words": {"a": "b"}}, TEXTS, "measure.words: two labels have one word"),
    ({"words": {"a": 3}}, TEXTS, "measure.words.a=3 should be a text"),
    ({"template": "x"}, TEXTS, "measure.template='x' has no place, or more than one, for the text"),
    ({}, Labelled(lambda: iter(TEST[3:]), TEXTS.train), "nothing to measure: no text that would be has a label"),
    ({}, Labelled(lambda: iter(TEST[:1]), lambda: iter(())), "the labels of the data are a: it takes two or more"),
])  # fmt: skip
def test_mistakes(words, texts, line):
    with pytest.raises(UserError, match=line):
        Labels(**words)(Unigram("ab"), texts)
