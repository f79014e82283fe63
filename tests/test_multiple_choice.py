"""Multiple choice: accuracies by hand from bytes of known probability, and the choice of transformers' T5."""

import pytest

from lmzoo.likelihood.multiple_choice import MultipleChoice
from spoken import Unigram
from test_questions import write

# bits: a 1, b 2, c 3, ... ; of the blank between, which every choice has, 8. Longer choices pay for it once.
SIGNS = "abcdefg "
ROWS = [  # bits without the blank; per byte with it
    {"question": "d", "choices": ["bb", "a", "c"], "answer": 1},  # 4 1 3: right; (12/2, 9/1, 11/1): 0, wrong
    {"question": "d", "choices": ["aaaa", "g", "b"], "answer": 0},  # 4 7 2: 2, wrong; (12/4, 15, 10): 0, right
]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_by_hand(family, tmp_path):
    """As one text, the blank's 8 bits are every choice's; per token they count as a token too."""
    found = MultipleChoice(batch_size=2)(Unigram(SIGNS, family), write(tmp_path / "a.jsonl", *ROWS))
    # per token: (12/3, 9/2, 11/2) -> 0, wrong; (12/5, 15/2, 10/2) -> 0, right
    assert found == {"accuracy": 0.5, "accuracy_per_byte": 0.5, "accuracy_per_token": 0.5, "items": 2}
    more = [{"question": "d", "choices": ["é", "cc"], "answer": 1}]  # 2 bytes of 100 nats and more
    assert MultipleChoice()(Unigram(SIGNS, family), write(tmp_path / "b.jsonl", *more))["accuracy"] == 1


def test_an_encoder_decoder_reads_no_blank_and_writes_the_end(tmp_path):
    """Bits with the eos, h, 9: (4+9, 1+9), per byte (13/2, 10), per token (13/3, 10/2)."""
    model = Unigram(SIGNS, "encoder-decoder")
    model.head.bias.data[model.tokenizer.eos] = -9 * 0.6931472
    found = MultipleChoice()(model, write(tmp_path / "a.jsonl", {"question": "d", "choices": ["bb", "a"], "answer": 1}))
    assert found == {"accuracy": 1, "accuracy_per_byte": 0, "accuracy_per_token": 0, "items": 1}


def test_fields_and_template(tmp_path):
    """The question's place is the template's, whatever else has braces."""
    measure = MultipleChoice("q", "c", "a", template="Q: {}\nA:", between="\n")
    (question,) = measure.questions(write(tmp_path / "a.jsonl", {"q": "x {} y", "c": ["1", "2"], "a": 0}))
    assert [tuple(pair) for pair in question.pairs] == [("Q: x {} y\nA:", n, "\n") for n in "12"]
    assert question.truth == 0
