"""Validation at a run's two ends."""

import pytest
import torch

import lmzoo
import tiny_run
from lmzoo import checkpoint
from tiny_run import TASKS, rows, spoken


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tiny_run.texts(tmp_path_factory.mktemp("texts"))


def test_validation_before_training(texts, tmp_path):
    """The row of step 0 is the fresh net's; the run is the one without it, and has the row once when resumed."""
    words = spoken(texts, *TASKS["clm"], "trainer.max_steps=4")
    lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'plain'}"))
    lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'first'}", "trainer.val_before_training=true"))
    first, *others = rows(tmp_path / "first")
    assert others == rows(tmp_path / "plain")
    assert (first["step"], first["epoch"], first["tokens"], first["train/loss"]) == ("0", "0.0", "0", "")
    still = lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'still'}", "optim.lr=0"))[1]
    assert float(first["val/loss"]) == still["val/loss"]
    states = [checkpoint.read(checkpoint.find(tmp_path / name))["state_dict"] for name in ("plain", "first")]
    assert all(torch.equal(states[0][name], weight) for name, weight in states[1].items())
    lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'first' / 'checkpoints' / 'step-000002.ckpt'}"))
    assert rows(tmp_path / "first") == [first, *others]
