"""The rows of metrics.csv: what they hold, when they are written, and what a resumed run does with them."""

from types import SimpleNamespace

import pytest

from lmzoo import checkpoint
from lmzoo.callbacks import Metrics
from lmzoo.callbacks.metrics import Table
from small_run import At, rows, run


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
    assert header == ["step", "epoch", "tokens", "train/loss", "lr", "grad_norm", "tokens_per_s", "val/loss"]


def test_throughput_is_tokens_over_elapsed_time_without_validation(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lmzoo.callbacks.metrics.time.perf_counter", lambda: clock.now)
    metrics = Metrics(tmp_path, every_n_steps=2)
    trainer = SimpleNamespace(
        global_step=0, max_steps=10, num_training_batches=10, is_global_zero=True, world_size=2, sanity_checking=False,
        callback_metrics={"val/loss": 1.0}, state=SimpleNamespace(fn="fit"),
    )  # fmt: skip
    monkeypatch.setattr("lmzoo.callbacks.metrics.validation_due", lambda trainer: trainer.global_step == 3)
    task = SimpleNamespace(plan=SimpleNamespace(mfu=lambda speed, devices: speed / 1000 / devices))
    metrics.on_train_start(trainer, task)
    for step, tokens in enumerate((100, 200, 300, 400), 1):
        clock.now += 2.0
        trainer.global_step = step
        metrics.on_train_batch_end(trainer, task, {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "tokens": tokens})
        if step == 3:
            metrics.on_validation_start(trainer, task)
            clock.now += 50.0
            metrics.on_validation_end(trainer, task)
    table = metrics.table.read()
    assert [(r["step"], r.get("tokens_per_s"), r.get("mfu")) for r in table] == [
        (2, 300 / 4, 0.0375), (3, None, None), (4, 700 / 4, 0.0875),
    ]  # fmt: skip


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
