"""Validation at a run's two ends, the end that comes early, and the one that was cut off."""

import json
import os
import signal

import pytest
import torch
from lmzoo.tasks.base import Task

import lmzoo
import tiny_run
from lmzoo import UserError, checkpoint
from lmzoo.callbacks import EarlyStopping
from marks import slow_but
from tiny_run import TASKS, digest, lean, rows, spoken


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


STILL = ("optim.lr=0", "trainer.max_steps=8", "trainer.val_every_n_steps=1")  # the first validation is the best


def steps(folder):
    return [int(row["step"]) for row in rows(folder) if row["val/loss"]]


def test_a_run_that_gets_no_better_ends_and_is_finished(texts, tmp_path, capsys):
    run = tmp_path / "run"
    words = spoken(texts, *TASKS["clm"], *STILL, f"run_dir={run}", "trainer.patience=2")
    _, metrics = lmzoo.fit(lmzoo.compose(*words))
    line = f"trainer.patience=2 without a better val/loss has ended the run after step 3 of 8; ckpt={run} with a longer"
    assert line in capsys.readouterr().out
    assert steps(run) == [1, 2, 3] and (run / "checkpoints/step-000003.ckpt").exists()
    assert json.loads((run / "result.json").read_text()) == metrics
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    with pytest.raises(UserError, match="trainer.patience=2 is over for that run, .* in val/loss for 2 validations"):
        lmzoo.fit(lmzoo.compose(f"ckpt={run}"))
    assert before == {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    lmzoo.fit(lmzoo.compose(f"ckpt={run}", "trainer.patience=4"))
    assert steps(run) == [1, 2, 3, 4, 5]
    lmzoo.fit(lmzoo.compose(f"ckpt={run}", "trainer.patience=null"))
    assert steps(run) == [*range(1, 9)]


def test_what_was_waited_for_is_counted_over_resumes(texts, tmp_path):
    words = spoken(texts, *TASKS["clm"], *STILL, "trainer.patience=3")
    for name in ("whole", "part"):
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / name}"))
    lmzoo.fit(lmzoo.compose(f"ckpt={tmp_path / 'part/checkpoints/step-000003.ckpt'}"))
    assert steps(tmp_path / "part") == [1, 2, 3, 4] and digest(tmp_path / "part") == digest(tmp_path / "whole")


def test_more_is_better_of_what_is_no_loss_and_a_run_that_improves_goes_on(texts, tmp_path):
    words = spoken(texts, *TASKS["clm"], "trainer.val_every_n_steps=1", "trainer.patience=1", "optim.lr=3e-3",
                   "schedule=constant")  # fmt: skip
    lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'run'}"))
    losses = [float(row["val/loss"]) for row in rows(tmp_path / "run")]
    assert len(losses) == 8 and losses == sorted(losses, reverse=True)
    modes = {monitor: EarlyStopping(monitor, 1).mode for monitor in ("val/loss", "val/accuracy", "val/bits_per_byte")}
    assert modes == {"val/loss": "min", "val/accuracy": "max", "val/bits_per_byte": "min"}
    words = spoken(texts, *TASKS["clm"], *STILL, "trainer.patience=2", "checkpoint.monitor=val/accuracy")
    lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'accuracy'}"))
    assert steps(tmp_path / "accuracy") == [1, 2, 3]


def test_a_patience_that_can_not_be(texts, tmp_path):
    with pytest.raises(UserError, match="trainer.patience=0 must be between 1 and"):
        lmzoo.compose(*spoken(texts, *TASKS["clm"], "trainer.patience=0"))
    words = spoken(texts, *TASKS["clm"], "trainer.patience=2", "checkpoint.monitor=val/f1", "checkpoint.keep_best=0")
    with pytest.raises(UserError, match="trainer.patience=2 waits for checkpoint.monitor=val/f1, but validation h"):
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={tmp_path / 'run'}"))


class Killed(BaseException):
    """The end of a process, as far as one in which tests run can have it."""


def kill(*_):
    raise Killed


def told(name):
    """Something that sends this process a signal."""
    return lambda *_: os.kill(os.getpid(), getattr(signal, name))


CUTS = {
    "killed in the last validation": ("on_validation_epoch_start", kill, Killed),
    "killed in the test": ("on_test_epoch_start", kill, Killed),
    "told to go in the last step": ("on_train_batch_start", told("SIGTERM"), 75),
    "told to go in the last validation": ("on_validation_epoch_start", told("SIGTERM"), 75),
    "told to go in the test": ("on_test_epoch_start", told("SIGTERM"), 75),
    "Ctrl-C in the test": ("on_test_epoch_start", told("SIGINT"), 75),
}


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".ckpt", ".json"))


@pytest.fixture(scope="module")
def tested(texts, tmp_path_factory):
    """(the words of a run with a test, its folder): 8 steps, validation at 3, 6 and the last."""
    folder = tmp_path_factory.mktemp("tested") / "run"
    test = texts["data=csv"][0].removeprefix("data.path=")
    words = [*spoken(texts, *TASKS["clm"], "data.micro_batch_size=1"), f"data.test_path={test}"]  # several batches each
    with lean():
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={folder}"))
    return words, folder


@pytest.mark.parametrize("cut", slow_but(["killed in the last validation", "told to go in the test"], CUTS))
def test_a_run_that_was_cut_off_behind_its_last_step_is_ended_by_going_on(tested, tmp_path, monkeypatch, capsys, cut):
    """The rows, the result and the files of the run that nobody disturbed; then it is complete."""
    (words, whole), run, (place, act, end) = tested, tmp_path / "run", CUTS[cut]
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with lean(), monkeypatch.context() as patch, pytest.raises((Killed, SystemExit)) as ended:
        usual = getattr(Task, place)
        patch.setattr(Task, place, lambda task, *given: usual(task, *given) if task.global_step < 7 + (
            place != "on_train_batch_start") else (act(), usual(task, *given)))
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={run}"))
    assert ended.type is Killed if end is Killed else ended.value.code == end
    line = f"stopped by a signal after step 8, saved: python -m lmzoo.train ckpt={run}\n"
    assert capsys.readouterr().out.count(line) == (end == 75)
    assert not (run / "result.json").exists()
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    with lean():
        lmzoo.fit(lmzoo.compose(f"ckpt={run}"))
    assert rows(run) == rows(whole) and digest(run) == digest(whole) and files(run) == files(whole)
    assert (run / "result.json").read_text() == (whole / "result.json").read_text()
    with pytest.raises(UserError, match="that run has taken 8 steps, and would end after 8: give a larger"):
        lmzoo.fit(lmzoo.compose(f"ckpt={run}"))


def test_a_run_that_ended_early_and_was_cut_off_is_ended_too(texts, tmp_path, monkeypatch):
    """By its patience, after the third step of eight, with a test."""
    test, run = texts["data=csv"][0].removeprefix("data.path="), tmp_path / "run"
    words = [*spoken(texts, *TASKS["clm"], *STILL, "trainer.patience=2"), f"data.test_path={test}"]
    with lean(), monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Task, "on_test_epoch_start", kill)
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={run}"))
    with lean():
        _, metrics = lmzoo.fit(lmzoo.compose(f"ckpt={run}"))
    assert {"val/loss", "test/loss"} <= metrics.keys() and steps(run) == [1, 2, 3]
    with pytest.raises(UserError, match="trainer.patience=2 is over for that run"):
        lmzoo.fit(lmzoo.compose(f"ckpt={run}"))


def test_a_second_ctrl_c_does_not_wait_and_says_how_to_go_on(tested, tmp_path, monkeypatch):
    (words, _), run = tested, tmp_path / "run"
    usual = Task.on_train_batch_start

    def twice(task, *given):
        if task.global_step == 4:
            told("SIGINT")()
            told("SIGINT")()
        return usual(task, *given)

    monkeypatch.setattr(Task, "on_train_batch_start", twice)
    with lean(), pytest.raises(KeyboardInterrupt) as end:
        lmzoo.fit(lmzoo.compose(*words, f"run_dir={run}"))
    assert str(end.value) == f"interrupted, saved: python -m lmzoo.train ckpt={run}" and end.value.exit_code == 130
