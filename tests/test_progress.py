"""What is printed while a run goes on: one bar on a terminal, lines elsewhere."""

import csv
import re
import sys

import pytest

import lmzoo
from lmzoo.callbacks import Progress
from small_run import At, run


def test_without_a_terminal_there_are_lines_and_no_bar(tmp_path, capsys):
    run(tmp_path, max_steps=8)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 8 and "\r" not in printed
    assert re.fullmatch(r"step 8/8  loss \d+\.\d{3}  tokens/s [\d,]+  val \d+\.\d{3}  00:00 left", lines[-1])


def test_the_last_line_has_the_last_validation(words, tmp_path, capsys):
    """At step 4 and, after the last step, at 6: one line of step 6, with the second."""
    lmzoo.fit(lmzoo.compose(*words(tmp_path, "model=gpt", "task=clm", "trainer.val_every_n_steps=4", "optim.lr=0.03")))
    (shown,) = re.findall(r"step 6/6 .* val (\S+)", capsys.readouterr().out)
    with open(tmp_path / "metrics.csv", newline="") as file:
        first, last = (float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"])
    assert shown == f"{last:.3f}" != f"{first:.3f}"


def test_the_loss_is_the_mean_over_all_targets_since_the_line_before(tmp_path, capsys):
    """Lines every step show each step's own; one line at the end the mean of all (every step has four targets)."""
    run(tmp_path / "a", max_steps=6)
    each = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    patient = At(1, lambda trainer: setattr(trainer.progress_bar_callback, "seconds", 3600.0))
    run(tmp_path / "b", patient, max_steps=6)
    (mean,) = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(each) == 6 and float(mean) == pytest.approx(sum(each) / 6, abs=1e-3)


def test_the_time_left_is_that_of_the_steps_taken_since_the_start_or_resume():
    progress = Progress()
    progress.total, progress.first, progress.shown = 1000, 100, {"loss": "4.321"}
    # 50 steps in 20 s: 850 are left, 340 s
    assert progress.line(150, elapsed=20.0) == "step 150/1000  loss 4.321  05:40 left"


def test_on_a_terminal_there_is_one_bar_over_all_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(tmp_path, max_steps=9)
    last = capsys.readouterr().out.split("\r")[-1]
    assert re.search(r"training 100% .* 9/9 steps, 00:00 left, loss=\d+\.\d{3}, tokens/s=[\d,]+", last)


def test_the_validation_bar_knows_its_length_from_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run(tmp_path, max_steps=6)
    shown = [bar for bar in capsys.readouterr().out.split("\r") if bar.startswith("validation")]
    assert shown and all(re.search(r" \d/7 batches", bar) for bar in shown)
