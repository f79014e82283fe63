"""The rows of metrics.csv: what they hold, when they are written, and what a resumed run does with them."""

import math
import resource
import signal
from types import SimpleNamespace

import pytest
import torch

from lmzoo import UserError, checkpoint
from lmzoo.callbacks import Metrics
from lmzoo.callbacks.metrics import COLUMNS, Table
from lmzoo.checks import explain
from small_run import At, rows, run

TASK = SimpleNamespace(device=torch.device("cpu"), net=None, identity={},
                       plan=SimpleNamespace(mfu=lambda *_: None))  # fmt: skip


def faked(**more) -> SimpleNamespace:
    """A trainer as the callback sees it, at step 0."""
    usual = {
        "global_step": 0, "max_steps": 9, "num_training_batches": 9, "is_global_zero": True, "world_size": 1,
        "callback_metrics": {"val/loss": 1.0}, "state": SimpleNamespace(fn="fit"), "optimizers": [],
        "train_dataloader": SimpleNamespace(waited=0.0), "datamodule": SimpleNamespace(seen=lambda step: {}),
    }  # fmt: skip
    return SimpleNamespace(**usual | more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: its folder and its parts."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_a_row_has_the_sizes_of_its_step(whole):
    table = rows(whole[0])
    assert [int(r["step"]) for r in table] == list(range(2, 21, 2))
    assert [int(r["tokens"]) for r in table] == [12 * step for step in range(2, 21, 2)]
    assert [float(r["epoch"]) for r in table] == pytest.approx([step / 7 for step in range(2, 21, 2)], abs=1e-4)
    assert {(r["lr"], r["grad_norm"]) for r in table} == {("0.05", "2.0")}
    with open(whole[0] / "metrics.csv") as file:
        header = file.readline().strip().split(",")
    assert header == ["step", "epoch", "tokens", "train/loss", "train/perplexity", "lr", "grad_norm", "tokens_per_s",
                      "data_wait", "memory_mb", "val/loss"]  # fmt: skip


def test_the_loss_of_a_row_is_the_mean_over_all_targets_since_the_one_before(tmp_path):
    """By hand: (1 x 5 + 3 x 4) / 4; a row without any target; a step without one, which does not count."""
    metrics = Metrics(tmp_path, every_n_steps=2)
    given = [(5.0, 1), (4.0, 3), (7.0, 0), (0.0, 0), (torch.tensor(8.0), 0), (torch.tensor(3.0), 2)]
    trainer = faked(max_steps=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmzoo.callbacks.metrics.validation_due", lambda trainer: False)
        metrics.on_train_start(trainer, TASK)
        for trainer.global_step, (loss, targets) in enumerate(given, 1):
            row = {"loss": loss, "targets": targets, "lr": 1.0, "grad_norm": 1.0, "tokens": 1}
            metrics.on_train_batch_end(trainer, TASK, row)
            again = Metrics(tmp_path)
            again.load_state_dict(metrics.state_dict())
            assert again.losses.plain() == metrics.losses.plain()
    assert [row["train/loss"] for row in metrics.table.read()] == pytest.approx([17 / 4, math.nan, 3], nan_ok=True)
    perplexities = [row["train/perplexity"] for row in metrics.table.read()]
    assert perplexities == pytest.approx([70.1054, math.nan, 20.0855], abs=1e-4, nan_ok=True)


def test_throughput_is_tokens_over_elapsed_time_without_validation(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lmzoo.callbacks.metrics.time.perf_counter", lambda: clock.now)
    metrics = Metrics(tmp_path, every_n_steps=2)
    trainer = faked(max_steps=10, world_size=2)
    monkeypatch.setattr("lmzoo.callbacks.metrics.validation_due", lambda trainer: trainer.global_step == 3)
    plan = SimpleNamespace(mfu=lambda speed, devices: speed / 1000 / devices)
    task = SimpleNamespace(**vars(TASK) | {"plan": plan})
    metrics.on_train_start(trainer, task)
    for step, tokens in enumerate((100, 200, 300, 400), 1):
        clock.now += 2.0
        trainer.train_dataloader.waited += 0.5 * step  # of the 4 s before step 2 the loader took 1.5, then 3.5
        trainer.global_step = step
        outputs = {"loss": 1.0, "targets": 1, "lr": 1.0, "grad_norm": 1.0, "tokens": tokens}
        metrics.on_train_batch_end(trainer, task, outputs)
        if step == 3:
            metrics.on_validation_start(trainer, task)
            clock.now += 50.0
            metrics.on_validation_end(trainer, task)
    table = metrics.table.read()
    assert [(r["step"], r.get("tokens_per_s"), r.get("mfu"), r.get("data_wait")) for r in table] == [
        (2, 300 / 4, 0.0375, 0.375), (3, None, None, None), (4, 700 / 4, 0.0875, 0.875),
    ]  # fmt: skip


@pytest.mark.parametrize(("groups", "outputs", "columns"), [
    ([("decay", 0.1, 0.05), ("no_decay", 0.1, 0.05)], {"skipped": 0}, {}),
    ([("decay", 0.1, 0.05), ("head", 0.2, 0.1)], {}, {"lr/decay": 0.05, "lr/head": 0.1}),
    ([("decay", 0.1, 0.0), ("head", 0.2, 0.0)], {}, {"lr/decay": 0.0, "lr/head": 0.0}),  # at a warm-up's begin
    ([], {"skipped": 2}, {"skipped": 2}),
    ([], {"skipped": 0, "loss_scale": 65536.0}, {"skipped": 0, "loss_scale": 65536}),
])  # fmt: skip
def test_columns_for_what_not_every_run_has(tmp_path, monkeypatch, groups, outputs, columns):
    monkeypatch.setattr("lmzoo.callbacks.metrics.validation_due", lambda trainer: False)
    groups = [{"name": name, "initial_lr": initial, "lr": lr} for name, initial, lr in groups]
    trainer, metrics = faked(optimizers=[SimpleNamespace(param_groups=groups)]), Metrics(tmp_path, every_n_steps=1)
    metrics.on_train_start(trainer, TASK)
    trainer.global_step = 1
    given = {"loss": 800.0, "targets": 1, "lr": 0.05, "grad_norm": 1.0, "tokens": 1}
    metrics.on_train_batch_end(trainer, TASK, given | outputs)
    (row,) = metrics.table.read()
    usual = {*COLUMNS, "memory_mb"}
    assert {name: value for name, value in row.items() if name not in usual} == columns
    assert row["train/perplexity"] == float("inf") and 50 < row["memory_mb"] < 10**5


def test_a_table_grows_by_columns_and_drops_a_torn_line(tmp_path):
    table = Table(tmp_path / "t.csv", ["step", "a"])
    table.cut(0)
    table.append({"step": 1, "a": 0.1 + 0.2})
    table.append({"step": 2, "b": -1e-05})
    assert (tmp_path / "t.csv").read_text() == "step,a,b\n1,0.30000000000000004,\n2,,-1e-05\n"
    with open(tmp_path / "t.csv", "a") as file:
        file.write("3,0.1,2.")
    again = Table(tmp_path / "t.csv", ["step", "a"])
    assert again.read() == [{"step": 1, "a": 0.1 + 0.2}, {"step": 2, "b": -1e-05}]
    again.cut(1)
    assert (tmp_path / "t.csv").read_text() == "step,a,b\n1,0.30000000000000004,\n"


@pytest.mark.parametrize("step", [5, 13])
def test_after_a_crash_the_rows_beyond_the_checkpoint_are_cut(whole, tmp_path, step):
    def crash(trainer):
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path, At(step, crash))
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("9999,1.0,5,0.1,,,\n14,2.0,1")  # a later row, and one torn by a kill
    run(tmp_path, ckpt=checkpoint.find(tmp_path))
    assert rows(tmp_path) == rows(whole[0])


def test_a_run_draws_its_picture(whole):
    assert (whole[0] / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("word", ["a", "id", "folder", "tags"])
def test_a_word_that_wandb_has_not_is_refused_at_once(tmp_path, word):
    with pytest.raises(UserError, match=f"callbacks.metrics.wandb: there is no word {word}; give group, mode, name"):
        Metrics(tmp_path, wandb={"mode": "offline", word: 1})


def test_a_disk_that_is_full_names_the_file(tmp_path):
    """Python's own error does not."""
    table = Table(tmp_path / "metrics.csv", ["step", "lr"])
    table.append({"step": 1, "lr": 0.1})
    handler, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            table.append({"step": 2, "lr": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert explain(error.value) == f"{tmp_path / 'metrics.csv'}: File too large (make room, or allow larger files)"
