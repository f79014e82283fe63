"""Made-up pairs of texts: their rules and their splits."""

from collections import Counter

import pytest
import torch

import lmzoo
from lmzoo.blocks.attention import Attention
from lmzoo.data.exercises import read_exercise
from lmzoo.errors import UserError


@pytest.mark.parametrize(("rule", "holds"), [
    ("copy", lambda text, answer: text == answer and 3 <= len(text) <= 5),
    ("reverse", lambda text, answer: text[::-1] == answer and text.islower()),
    ("addition", lambda text, answer: eval(text) == int(answer)),
])  # fmt: skip
def test_answers_follow_the_rule(rule, holds):
    documents = list(read_exercise(rule=rule, n_texts=3000, shortest=3, longest=5))
    assert all(holds(document.text, document.second) for document in documents)
    assert len({document.text for document in documents}) == len(documents) == (8100 if rule == "addition" else 3000)
    shares = {split: n / len(documents) for split, n in Counter(d.split for d in documents).items()}
    assert shares == pytest.approx({"train": 0.8, "val": 0.1, "test": 0.1}, abs=0.03)


def test_the_seed_decides():
    first, again, other = (list(read_exercise(n_texts=50, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_nothing_is_read():
    with pytest.raises(UserError, match="data.path=a.txt: an exercise is made up and reads nothing"):
        next(read_exercise("a.txt"))


class Cut(Attention):
    """Attention that brings nothing."""

    def forward(self, x, *_, **__):
        return torch.zeros_like(x)


@pytest.mark.slow
def test_reversal_is_learned_and_needs_the_source(tmp_path):
    """By the paper's net; cut off from what it is to reverse it can but guess."""
    small = ("experiment=reverse", "model.n_layers=2", "data.reader.longest=7", "task.n_answers=0",
             "logger.wandb.mode=disabled", f"data.cache_dir={tmp_path / 'cache'}")  # fmt: skip
    cut = ("model.cross._target_=test_exercises.Cut", "trust=[test_exercises]", "task.max_answer=8")
    _, found = lmzoo.fit(lmzoo.compose(*small, "trainer.max_steps=700", f"run_dir={tmp_path / 'whole'}"))
    _, lost = lmzoo.fit(lmzoo.compose(*small, *cut, "trainer.max_steps=300", f"run_dir={tmp_path / 'cut'}"))
    assert found["test/exact_match"] > 0.99 and lost["test/exact_match"] < 0.01
