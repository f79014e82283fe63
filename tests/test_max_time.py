"""`trainer.max_time` ends a run early, which then validates, saves and tests as any other."""

import csv
import json

import pytest
from lightning.pytorch.callbacks import Timer

import lmzoo
from lmzoo import UserError

HOUR = "trainer.max_time=00:01:00:00"


@pytest.fixture
def over_after_four(monkeypatch):
    """A clock on which the hour is over with the fourth step of a process."""
    steps = []
    monkeypatch.setattr(Timer, "on_train_batch_end", lambda self, trainer, *_: (
        steps.append(1), self._check_time_remaining(trainer)))  # fmt: skip
    monkeypatch.setattr(Timer, "time_elapsed", lambda self, stage="train": self._offset + 900 * len(steps))
    return steps


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_ended_by_time_is_whole(words, tmp_path, over_after_four, capsys):
    """Step 4 of 20, where neither validation nor a checkpoint is due: both come, one row for the step, and a result."""
    folder = tmp_path / "run"
    more = ("model=gpt", "task=clm", "trainer.max_steps=20", "trainer.val_every_n_steps=7", "schedule=linear", HOUR)
    lmzoo.fit(lmzoo.compose(*words(folder, *more, "schedule.warmup_fraction=0", "optim.lr=1")))
    said, written = capsys.readouterr().out, rows(folder)
    assert f"trainer.max_time=00:01:00:00 has ended the run after step 4 of 20; ckpt={folder} with a longer" in said
    assert "step 4/20  loss" in said
    assert [row["step"] for row in written] == ["1", "2", "3", "4"]
    assert [float(row["lr"]) for row in written] == pytest.approx([1, 0.95, 0.9, 0.85])  # the schedule is of 20 steps
    assert written[-1]["val/loss"] and written[-1]["train/loss"]
    assert json.loads((folder / "result.json").read_text())["val/loss"] == pytest.approx(float(written[-1]["val/loss"]))
    names = {file.name.partition("-")[0] for file in (folder / "checkpoints").glob("*.ckpt")}
    assert names == {"step", "best", "last.ckpt"} and (folder / "checkpoints" / "step-000004.ckpt").exists()


def test_its_time_is_counted_over_resumes(words, tmp_path, over_after_four):
    """An hour that is over is over; two hours are one more hour."""
    folder = tmp_path / "run"
    lmzoo.fit(lmzoo.compose(*words(folder, "model=gpt", "task=clm", "trainer.max_steps=20", HOUR)))
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    over_after_four.clear()
    with pytest.raises(UserError, match="trainer.max_time is over for that run: give a longer one to go on"):
        lmzoo.fit(lmzoo.compose(f"ckpt={folder}"))
    assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    lmzoo.fit(lmzoo.compose(f"ckpt={folder}", "trainer.max_time=00:02:00:00"))
    assert [row["step"] for row in rows(folder)][-1] == "8"


def test_no_time_at_all_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))
    given = words(tmp_path / "run", "model=gpt", "task=clm", "trainer.max_time=00:00:00:00")
    with pytest.raises(UserError, match="trainer.max_time leaves no time for a single step: give a longer one"):
        lmzoo.fit(lmzoo.compose(*given))


def test_a_run_that_saved_nothing_does_not_say_that_it_goes_on(words, tmp_path, over_after_four, capsys):
    more = ("model=gpt", "task=clm", "trainer.max_steps=20", HOUR, "~callbacks.checkpoints")
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *more)))
    assert "after step 4 of 20; nothing was saved, so that none goes on with it" in capsys.readouterr().out


def test_time_goes_with_any_length():
    """With it alone no schedule would know where it ends (test_ranges); any length will do."""
    for word in ("trainer.max_steps=9", "trainer.max_tokens=9", "trainer.max_epochs=1"):
        assert lmzoo.compose("model=gpt", "task=clm", "size=base", HOUR, word).trainer.max_time == "00:01:00:00"
