"""Gradients by layer against autograd's on each weight, and the whole on nets that train in a second."""

import random

import pytest
import torch
from lmzoo.tools import norm_study
from torch import nn

SMALL = ["size=tiny", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.max_len=16", "tokenizer=byte",
         "data=text", "data.batch_size=4", "logger.wandb.mode=disabled", "data.processes=1", "trainer.max_steps=2"]


def test_the_norm_is_over_all_weights_of_a_block():
    block = nn.Linear(2, 1)
    for weight, gradient in zip(block.parameters(), ([[2.0, 3.0]], [6.0]), strict=True):
        weight.grad = torch.tensor(gradient)
    assert norm_study.norm(block) == pytest.approx(7.0)


def test_a_warm_up_of_ones_own_is_left_out_where_there_is_to_be_none():
    words = ["schedule.warmup_fraction=0.3", "model=gpt"]
    assert norm_study.spoken(words, "warm-up") == words
    assert norm_study.spoken(words, "none") == ["model=gpt", "schedule.warmup_steps=0"]


@pytest.mark.slow
def test_a_small_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text("\n\n".join("".join(draw.choices("abc ", k=60)) for _ in range(99)))
    words = [*SMALL, f"data.path={tmp_path / 'a.txt'}"]
    lines = norm_study.study(words, [2, 6], ["pre", "post"], tmp_path / "a.png").splitlines()
    assert [line.split("  ")[0] for line in lines] == ["norm", "pre, 2 layers", "pre, 6 layers", "post, 2 layers",
                                                      "post, 6 layers"]  # fmt: skip
    assert all(len(line) <= 100 for line in lines) and (tmp_path / "a.png").stat().st_size > 5000
    last = {line[:18].strip(): float(line.split()[-4]) for line in lines[1:]}
    assert last["post, 6 layers"] > last["pre, 6 layers"]  # Xiong et al., theorem 1: sqrt(6) times, in the mean
