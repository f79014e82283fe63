"""What a run leaves to go on from; interrupted and resumed, it is the run that was never interrupted."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback

import lmzoo
import small_run
from lmzoo import UserError, checkpoint
from lmzoo.callbacks import Checkpoints, saving
from marks import slow_but
from small_run import At, names, rows, run, score


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: its folder and its parts."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_checkpoints_are_named_by_step_pruned_and_linked(whole):
    folder, _ = whole
    found = names(folder)
    assert [n for n in found if n.startswith("step-")] == ["step-000016.ckpt", "step-000020.ckpt"]
    assert len([n for n in found if n.startswith("best-")]) == 2
    assert set(found) >= {"last.ckpt", "MANIFEST.json"} and len(found) == 6
    last, newest = folder / "checkpoints/last.ckpt", folder / "checkpoints/step-000020.ckpt"
    assert os.path.samefile(last, newest)
    assert checkpoint.find(folder) == last
    assert checkpoint.read(last)["global_step"] == 20


def test_the_best_files_hold_the_weights_that_gave_the_metric_in_their_name(whole):
    folder, _ = whole
    scores = {int(r["step"]): float(r["val/loss"]) for r in rows(folder) if "val/loss" in r}
    assert sorted(scores) == [6, 12, 18]
    best = sorted(scores, key=scores.get)[:2]
    for step, value in ((step, scores[step]) for step in best):
        state = checkpoint.read(folder / f"checkpoints/best-{step:06d}-{value:.6g}.ckpt")
        assert state["global_step"] == step
        assert float(score(state["state_dict"]["net.weight"])) == value


def test_checkpoints_hold_plain_types_only(whole):
    torch.load(whole[0] / "checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize("settings", [{"every_n_steps": None}, {"keep_last": 1}])
def test_the_last_step_is_saved_whatever_the_interval(tmp_path, settings):
    run(tmp_path, max_steps=3, **settings)
    assert names(tmp_path) == ["MANIFEST.json", "last.ckpt", "step-000003.ckpt"]


def test_nothing_is_best_without_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(small_run, "score", lambda weight: torch.tensor(float("nan")))
    run(tmp_path, max_steps=6)
    assert [n for n in names(tmp_path) if n.startswith("best-")] == []


@pytest.mark.parametrize("name, step", [("SIGUSR1", 3), *(("SIGTERM", step) for step in (4, 6, 7, 12, 14, 19))])
def test_a_run_that_was_told_to_go_and_resumed_is_the_whole_run(whole, tmp_path, name, step):
    """Inside an epoch and at its end (7, 14), where a save is due (4), validation (6), both (12)."""
    before = signal.getsignal(getattr(signal, name))
    first = run(tmp_path, At(step, lambda trainer: os.kill(os.getpid(), getattr(signal, name))))
    assert signal.getsignal(getattr(signal, name)) is before
    assert first.preemption.preempted and first.preemption.exit_code == 75
    assert first.trainer.global_step in (step, step + 1)  # Python may hand the signal over a moment later
    assert checkpoint.read(checkpoint.find(tmp_path))["global_step"] == first.trainer.global_step

    second = run(tmp_path, ckpt=checkpoint.find(tmp_path))
    folder, reference = whole
    assert not second.preemption.preempted
    assert rows(tmp_path) == rows(folder)
    for own, other in zip(second.task.state_dict().values(), reference.task.state_dict().values(), strict=True):
        assert torch.equal(own, other)
    assert [n for n in names(tmp_path) if n[:4] == "best"] == [n for n in names(folder) if n[:4] == "best"]


def test_a_validation_that_is_due_is_not_lost_by_saving_before_it(tmp_path):
    """A kill during the validation of step 12: the run goes on from 8 and has the row with its metric."""

    class Killed(Callback):
        def on_validation_start(self, trainer, *_):
            if trainer.global_step == 12:
                raise KeyError("killed")

    with pytest.raises(KeyError):
        run(tmp_path, Killed())
    assert checkpoint.read(checkpoint.find(tmp_path))["global_step"] == 8
    run(tmp_path, ckpt=checkpoint.find(tmp_path))
    assert [int(r["step"]) for r in rows(tmp_path) if "val/loss" in r] == [6, 12, 18]


def test_nor_by_a_signal_and_a_kill_during_it(whole, tmp_path):
    """Told to go in step 12, killed in its validation: the run that goes on validates first, and is the whole one."""

    class Killed(Callback):
        def on_validation_start(self, trainer, *_):
            if trainer.global_step == 12:
                raise KeyError("killed")

    with pytest.raises(KeyError):
        run(tmp_path, Killed(), At(12, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)))
    assert checkpoint.read(checkpoint.find(tmp_path))["global_step"] == 12
    second = run(tmp_path, ckpt=checkpoint.find(tmp_path))
    assert rows(tmp_path) == rows(whole[0]) and names(tmp_path) == names(whole[0])
    for own, other in zip(second.task.state_dict().values(), whole[1].task.state_dict().values(), strict=True):
        assert torch.equal(own, other)


def test_checkpoints_by_the_clock(tmp_path, monkeypatch):
    """Three minutes a step, every ten minutes: after the fourth step, the eighth, the twelfth, and the last."""
    now = [0.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    written = []
    monkeypatch.setattr(saving, "link", lambda path, name: written.append(path.name) if name == "last.ckpt" else None)
    ticking = LambdaCallback(on_train_batch_start=lambda *_: now.__setitem__(0, now[0] + 180))
    run(tmp_path, ticking, max_steps=14, every_n_steps=None, every_minutes=10, keep_best=0)
    assert written == [f"step-{step:06d}.ckpt" for step in (4, 8, 12, 14)]


@pytest.mark.parametrize(("monitor", "best"), [("val/loss", min), ("val/accuracy", max), ("val/error_rate", min)])
def test_the_name_of_a_metric_tells_which_end_is_better(tmp_path, monkeypatch, monitor, best):
    scores = {6: 2.0, 12: 3.0, 18: 1.0}
    monkeypatch.setattr(small_run.Task, "on_validation_epoch_end",
                        lambda task: task.log(monitor, scores[task.global_step], sync_dist=True))  # fmt: skip
    run(tmp_path, max_steps=18, keep_best=1, monitor=monitor)
    step = best(scores, key=scores.get)
    assert [n for n in names(tmp_path) if n[:4] == "best"] == [f"best-{step:06d}-{scores[step]:.6g}.ckpt"]


def test_a_metric_that_validation_does_not_have_is_refused_with_those_that_it_has(tmp_path):
    with pytest.raises(UserError, match="checkpoint.monitor=val/f2: validation has val/accuracy, .*, val/loss"):
        run(tmp_path, monitor="val/f2")


def test_a_validation_without_the_metric_is_not_the_best(tmp_path):
    """It could be there, but was not defined."""
    run(tmp_path, max_steps=6, monitor="val/f1")
    assert names(tmp_path) == ["MANIFEST.json", "last.ckpt", "step-000004.ckpt", "step-000006.ckpt"]


def test_a_run_keeps_to_its_metric(tmp_path):
    run(tmp_path, max_steps=6)
    with pytest.raises(UserError, match="checkpoint.monitor=val/f1: this run's best are by val/loss"):
        run(tmp_path, ckpt=checkpoint.find(tmp_path), monitor="val/f1")


@pytest.mark.parametrize("monitor", slow_but(["val/Loss"], ["val/Loss", "val/a", "val/a/f1"]))
def test_a_metric_that_no_validation_will_have_is_refused_before_the_first_step(words, tmp_path, corpus, monitor):
    """With those that it will have, named sets' too; what it has is let through."""
    sets = ("model=gpt", "task=clm", f"data.val_path.a={corpus}", f"data.path={tmp_path / 'text.txt'}")
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(map(str, range(n, n + 40))) for n in range(90)))
    started = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="val/a/loss, .*val/loss") as refusal:
        patch.setattr("lmzoo.tasks.base.Task.training_step", lambda *_: started.append(1))
        lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *sets, f"checkpoint.monitor={monitor}")))
    assert str(refusal.value).startswith(f"checkpoint.monitor={monitor}: validation has ") and not started
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", *sets, "checkpoint.monitor=val/a/perplexity")))


def test_every_task_tells_its_metrics_ahead(words, tmp_path):
    """They are those that validation then logs."""

    class Ahead(Checkpoints):
        def on_fit_start(self, trainer, task):
            told.append(sorted(task.measured()))

        def on_validation_end(self, trainer, *_):
            told.append(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))

    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"number {n},{n % 2}\n" for n in range(99)))
    labelled = {"classification": ("data=csv", f"data.path={table}")}
    for model, name in (("gpt", "clm"), ("bert", "mlm"), ("t5", "span_corruption"), ("bert", "classification")):
        told = []
        more = (f"model={model}", f"task={name}", "trainer.max_steps=1", *labelled.get(name, ()))
        config = lmzoo.compose(*words(tmp_path / name, *more))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmzoo.callbacks.Checkpoints", Ahead)
            lmzoo.fit(config)
        assert len(told) == 2 and told[0] == told[1] and "val/loss" in told[0]


class Full(LambdaCallback):
    """No file may grow beyond 1,000 bytes at some steps, as on a disk that is full."""

    def __init__(self, first: int, last: int):
        self.limit, full = resource.getrlimit(resource.RLIMIT_FSIZE), range(first, last + 1)
        super().__init__(on_train_batch_end=lambda trainer, *_: self.set(1000 if trainer.global_step in full else None))

    def set(self, n: int | None) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit[0] if n is None else n, self.limit[1]))


def test_a_full_disk_is_one_warning_and_the_run_goes_on(whole, tmp_path, recwarn):
    """From step 8 to 13 nothing can be written; the earlier files stay, later ones are the undisturbed run's."""
    full = Full(8, 13)
    seen = []
    look = At(13, lambda trainer: seen.extend(names(tmp_path)))
    try:
        disturbed = run(tmp_path, look, full, keep_best=1)
    finally:
        full.set(None)
    warned = [str(w.message) for w in recwarn if "could not be written" in str(w.message)]
    assert len(warned) == 1 and "step-000008.ckpt could not be written (" in warned[0]
    assert "File too large" in warned[0]
    assert [name for name in seen if name[:4] == "step"] == ["step-000004.ckpt"] and "last.ckpt" in seen
    assert [name for name in names(tmp_path) if name[:4] == "step"] == ["step-000016.ckpt", "step-000020.ckpt"]
    for own, other in zip(disturbed.task.state_dict().values(), whole[1].task.state_dict().values(), strict=True):
        assert torch.equal(own, other)


def test_a_run_whose_last_checkpoint_the_disk_refuses_ends_with_that(tmp_path):
    full = Full(5, 8)
    try:
        with pytest.raises(UserError, match="step-000008.ckpt: the run's last checkpoint could not be") as error:
            run(tmp_path, full, max_steps=8)
    finally:
        full.set(None)
    assert "\n" not in str(error.value)
    assert checkpoint.read(checkpoint.find(tmp_path))["global_step"] == 4
    assert not list(tmp_path.rglob("*.tmp"))


def test_where_no_checkpoint_could_be_written_none_is_spoken_of(tmp_path, recwarn):
    full = Full(1, 8)
    try:
        with pytest.raises(UserError, match="make room and start again: none was written"):
            run(tmp_path, full, max_steps=8)
    finally:
        full.set(None)
    (warned,) = [str(w.message) for w in recwarn if "could not be written" in str(w.message)]
    assert "there is none yet" in warned


TWO_RANKS = """
import os, sys, signal, torch
sys.path.insert(0, {tests!r})
import small_run as t, lightning.pytorch as pl
folder = t.Path({folder!r})
if int(os.environ.get("LOCAL_RANK", 0)) == 1:
    kill = t.At(5, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
else:
    kill = t.At(5, lambda trainer: None)
Trainer = pl.Trainer
pl.Trainer = lambda **k: Trainer(**k, strategy="ddp", devices=2)
parts = t.run(folder, kill)
if parts.preemption.preempted and parts.trainer.is_global_zero:
    sys.exit(parts.preemption.exit_code)
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_saves_and_ends_both(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 75, done.stderr[-2000:]
    state = checkpoint.read(checkpoint.find(tmp_path / "run"))
    assert state["global_step"] in (5, 6)
    assert state["callbacks"]["Metrics"]["tokens"] == 12 * state["global_step"]
    assert len([r for r in rows(tmp_path / "run") if "train/loss" in r]) == state["global_step"] // 2  # by one rank
