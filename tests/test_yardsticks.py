"""The yardsticks' counting on cases worked out by hand, and the whole tool on a small run."""

import math

import numpy as np
import pytest
import torch
from lmzoo.tools import yardsticks


def test_unigram_adds_one_to_every_count():
    seen, held_out = np.array([0, 0, 1]), np.array([0, 1, 2])  # counts 2, 1, 0: (3, 2, 1) of 6
    assert yardsticks.unigram(seen, held_out, 3) == pytest.approx([math.log(2), math.log(3), math.log(6)])


def test_bigram_is_the_best_mixture_with_the_unigram():
    before, seen = np.array([0, 0, 0, 1]), np.array([1, 1, 2, 0])  # after 0: twice 1, once 2
    unigram = {0: 2 / 7, 1: 3 / 7, 2: 2 / 7}
    nats = yardsticks.bigram(before, seen, np.array([0, 2]), np.array([1, 0]), 3)  # nothing was seen after 2
    expected = [-(math.log((2 + m * unigram[1]) / (3 + m)) + math.log(unigram[0])) / 2 for m in yardsticks.MASSES]
    assert nats == pytest.approx(min(expected))


def test_pairs_are_inputs_with_their_targets():
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, -100, 8]])}
    inputs, targets = yardsticks.pairs([batch, batch])
    assert inputs.tolist() == [5, 7, 5, 7] and targets.tolist() == [6, 8, 6, 8]


def test_rolled_moves_inputs_and_their_mask_alone():
    batch = {"input_ids": torch.tensor([[1], [2]]), "attention_mask": torch.tensor([[1], [0]]), "labels": torch.ones(2)}
    moved = yardsticks.rolled(batch)
    assert moved["input_ids"].tolist() == [[2], [1]] and moved["attention_mask"].tolist() == [[0], [1]]
    assert moved["labels"] is batch["labels"]


def test_the_run_s_own_number_is_its_last_validation(gpt_run):
    last = [line.split(",") for line in (gpt_run / "metrics.csv").read_text().splitlines()]
    logged = float(dict(zip(last[0], last[-1], strict=True))["val/bits_per_byte"])
    rows = {what: value for what, value, _ in yardsticks.yardsticks(str(gpt_run))}
    assert rows["this run"] == pytest.approx(logged, rel=1e-5)
    assert rows["unigram"] > 0 and rows["smoothed bigram"] > 0 and rows["xz"] > 0
