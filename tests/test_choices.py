"""Wishes that cannot be met, one line each."""

import math

import pytest

from lmzoo.choices import check_choices, check_use
from lmzoo.errors import UserError


@pytest.mark.parametrize(
    "words, line",
    [
        ({"temperature": 0.0}, "temperature=0.0 must be above 0; for greedy decoding, the likeliest token each time"),
        ({"temperature": math.nan}, "temperature=nan must be above 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0 and 1"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0; 1 changes nothing"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_k": 51, "vocab_size": 50}, "top_k=51 must be between 1 and the vocabulary's size, 50"),
        ({"n_beams": 51, "vocab_size": 50}, "n_beams=51 must be between 1 and the vocabulary's size, 50"),
        ({"n_beams": 0}, "n_beams=0 must be at least 1"),
        ({"n_beams": 3, "n_best": 4}, "n_best=4 must be between 1 and n_beams=3"),
        ({"n_best": 0}, "n_best=0"),
        *(({"n_beams": 2, word: 0.5}, f"{word} is for sampling") for word in ("temperature", "top_p", "min_p")),
        ({"n_beams": 2, "top_k": 5}, "top_k is for sampling, but n_beams=2 looks for what is likeliest"),
    ],
    ids=str,
)
def test_refused(words, line):
    with pytest.raises(UserError) as refusal:
        check_choices(**words)
    assert str(refusal.value).startswith(line) and "\n" not in str(refusal.value)


def test_what_can_be():
    check_choices()
    check_choices(temperature=0.1, top_k=50, top_p=1.0, min_p=0.0, repetition_penalty=0.5, vocab_size=50)
    check_choices(n_beams=4, n_best=4, repetition_penalty=1.2, vocab_size=50)


def test_words_that_nothing_looks_at():
    words = dict.fromkeys(["temperature", "top_k", "top_p", "min_p", "n_best", "prompts_path"])
    words |= {"n_beams": 1, "seed": 0, "length_penalty": 1.0, "batch_size": 16}
    uses = {"seed": {"min_p": 0.1}, "length_penalty": {"n_beams": 2}, "batch_size": {"prompts_path": "a"}}
    check_use(["prompt"], words)
    for word, use in uses.items():
        with pytest.raises(UserError, match=f"^{word}={words[word]} .* too, or leave it out$"):
            check_use(["prompt", word], words)
        check_use(["prompt", word], words | use)
    check_use(["length_penalty"], words | {"n_best": 1})
