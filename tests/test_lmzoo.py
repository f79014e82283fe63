"""Mistakes in calls of the public names are one line each, a UserError."""

from functools import cache

import pytest
from omegaconf import OmegaConf

import lmzoo
from lmzoo.literal import plain

WORDS = ("model=gpt", "task=clm", "tokenizer.vocab_size=50")
WRONG_SIZES = (0, -1, "x", None, 1.5, [], {}, True, 10**15)
SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "max_len")
PARTS = ("embed", "position", "attention", "ffn", "norm", "block", "head", "init")
LONG = "a" * 300


@cache
def gpt():
    return plain(lmzoo.compose(*WORDS).model)


CALLS = {
    "compose": [[["model=gpt"]], [3], [None], [*WORDS, 5], [*WORDS, f"run_dir={LONG}"],
                [*WORDS, f"run_dir=/tmp/{LONG}/y"], [f"ckpt={LONG}"], ["task=clm", f"init_from={LONG}"],
                [*WORDS, "run_dir=a\0b"]],
    "load": [["a" * 5000], [LONG], [None], [3], [[]], ["a\0b"], ["/nowhere"], [__file__], [f"{__file__}/below"]],
    "build": [[None], [3], ["x"], [[]], [{}], [{"_target_": None}], [{"_target_": "lmzoo.models.Decoder"}]],
    "fit": [[None], [3], [{}], ["model=gpt"], [list(WORDS)], [OmegaConf.create({"a": 1})]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, calls in CALLS.items() for given in calls])
def test_a_mistake_is_one_line(name, given):
    with pytest.raises(lmzoo.UserError) as refusal:
        getattr(lmzoo, name)(*given)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_a_list_of_words_is_to_be_starred():
    with pytest.raises(lmzoo.UserError, match=r"of a list compose\(\*words\)"):
        lmzoo.compose(list(WORDS))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_no_net_can_have(size):
    for value in WRONG_SIZES:
        with pytest.raises(lmzoo.UserError, match=f"^model.{size}="):
            lmzoo.build(gpt() | {size: value})


@pytest.mark.parametrize("part", PARTS)
def test_what_is_no_part(part):
    for value in (0, "x", None, 1.5, [], {}, True):
        with pytest.raises(lmzoo.UserError, match=f"^model.{part}"):
            lmzoo.build(gpt() | {part: value})


def test_a_net_that_is_right_is_built():
    net = lmzoo.build(gpt())
    assert net.config == gpt() and net.vocab_size == 50
