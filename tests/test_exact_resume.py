"""A run that was stopped and resumed is the run that was not, bit for bit, whatever it is made of (BEHAVIOUR 31, 32).

Epochs are of a few steps, each with a checkpoint, so that runs are resumed in the first, at its end and in the second.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import lmzoo
import tiny_run
from marks import slow_but
from tiny_run import TASKS, digest, rows, spoken


@pytest.fixture(scope="module", autouse=True)
def lean():
    with tiny_run.lean():
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    found = tiny_run.texts(folder)
    words = [line.split() for line in (folder / "a.txt").read_text().split("\n\n")]
    lines = [json.dumps({"words": row, "tags": [f"t{len(word) % 2}" for word in row]}) for row in words if row]
    (folder / "d.jsonl").write_text("\n".join(lines))
    return found | {"data=jsonl": [f"data.path={folder / 'd.jsonl'}"]}


def resume(whole, folder, step, *more):
    """Go on with a copy of the run as it was after a step, after somebody else has drawn random numbers."""
    shutil.copytree(whole, folder)
    torch.manual_seed(step)
    torch.rand(step)
    lmzoo.fit(lmzoo.compose(f"ckpt={folder / 'checkpoints' / f'step-{step:06d}.ckpt'}", *more))


CASES = {f"{task}, {n} micro-batches": (*words, f"data.micro_batch_size={8 // n}") for task, words in TASKS.items()
         for n in (1, 4)}  # fmt: skip
CASES |= {
    "clm, 2 workers": (*TASKS["clm"], "data.micro_batch_size=4", "data.num_workers=2"),
    "mixture": (*TASKS["clm"][:2], "data=mixture", "data.micro_batch_size=4"),
    "mixture, 2 workers": (*TASKS["mlm"][:2], "data=mixture", "data.num_workers=2"),
    "muon, isolated": (*TASKS["mlm"], "optim=muon", "data.packing=isolate"),
    "adafactor": (*TASKS["clm"], "optim=adafactor"),
    "regression": ("model=bert", "task=regression", "data=csv", "data.micro_batch_size=2"),
    "token_classification": ("model=bert", "task=token_classification", "data=jsonl", "data.words_column=words",
                             "data.tags_column=tags", "data.micro_batch_size=2"),
    "seq2seq, a decoder": ("model=gpt", "task=seq2seq", "data=csv", "data.target_column=label"),
    "seq2seq, both": ("model=t5", "task=seq2seq", "data=csv", "data.target_column=label", "data.micro_batch_size=2"),
}


QUICK = ("span_corruption, 4 micro-batches", "clm, 2 workers", "classification, 4 micro-batches", "muon, isolated")


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_bit_for_bit(texts, tmp_path, case):
    """Resumed in the first epoch and in the second: the same weights, moments, losses, rates and rows."""
    whole = tmp_path / "whole"
    lmzoo.fit(lmzoo.compose(*spoken(texts, *CASES[case], f"run_dir={whole}")))
    steps = [float(row["epoch"]) for row in rows(whole)]
    assert steps[-1] > 1.5 and [int(row["step"]) for row in rows(whole)] == [2, 3, 4, 6, 8]
    for step in (2, 7):
        resume(whole, tmp_path / str(step), step)
        assert digest(tmp_path / str(step)) == digest(whole)
        assert rows(tmp_path / str(step)) == rows(whole)


def test_workers_change_nothing(texts, tmp_path):
    """And a digest tells runs apart: another seed has another."""
    digests = []
    for name, more in (("none", ()), ("two", ("data.num_workers=2",)), ("other", ("seed=1",))):
        lmzoo.fit(lmzoo.compose(*spoken(texts, *TASKS["mlm"], f"run_dir={tmp_path / name}", *more)))
        digests.append(digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["clm", "classification"])  # rows of one length, and of many
def test_compiled(texts, tmp_path, task):
    whole = tmp_path / "whole"
    torch.compiler.reset()  # what an earlier run has left would be compiled already
    lmzoo.fit(lmzoo.compose(*spoken(texts, *TASKS[task], f"run_dir={whole}", "compile=true")))
    torch.compiler.reset()
    resume(whole, tmp_path / "again", 3)
    assert digest(tmp_path / "again") == digest(whole) and rows(tmp_path / "again") == rows(whole)


DDP = ("trainer=ddp", "trainer.accelerator=cpu", "data.micro_batch_size=2")


def command(*words):
    done = subprocess.run([sys.executable, "-m", "lmzoo.train", *words], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr


def close(one, other):
    """Whether the rows of two runs agree in all numbers to 1e-5; their counts are then equal."""
    assert len(one) == len(other)
    for ours, theirs in zip(one, other, strict=True):
        found, wanted = ({name: float(cell) for name, cell in row.items() if cell} for row in (ours, theirs))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TASKS, "mixture"])
def test_two_ranks(texts, tmp_path, case):
    """Resumed as two: bit for bit. As one: the same order, losses to 1e-5, dropout on; and so if it was always one.

    An epoch's last step has rows for one rank only: the other has no target.
    """
    words = (*TASKS["clm"][:2], "data=mixture") if case == "mixture" else TASKS[case]
    command(*spoken(texts, *words, f"run_dir={tmp_path / 'whole'}", *DDP))
    shutil.copytree(tmp_path / "whole", tmp_path / "two")
    command(f"ckpt={tmp_path / 'two' / 'checkpoints' / 'step-000005.ckpt'}")
    assert digest(tmp_path / "two") == digest(tmp_path / "whole")
    assert rows(tmp_path / "two") == rows(tmp_path / "whole")
    resume(tmp_path / "whole", tmp_path / "one", 2, "trainer.strategy=auto", "trainer.devices=1")
    close(rows(tmp_path / "one"), rows(tmp_path / "whole"))
    alone = spoken(texts, *words, f"run_dir={tmp_path / 'alone'}", "data.micro_batch_size=2")
    lmzoo.fit(lmzoo.compose(*alone))
    close(rows(tmp_path / "alone"), rows(tmp_path / "whole"))
