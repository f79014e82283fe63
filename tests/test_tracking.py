"""wandb's own file read back, and wandb failing at every moment."""

import json
import logging
import os
import resource
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import lmzoo
from lmzoo import UserError, checkpoint
from lmzoo.callbacks import Wandb
from lmzoo.callbacks.tracking import TensorBoard, records
from small_run import At, rows, run

OFFLINE = {"mode": "offline", "project": "p"}


def read_wandb(folder: Path) -> SimpleNamespace:
    """What all finished runs below `folder` wrote."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = SimpleNamespace(ids=[], groups=[], tags=[], notes=[], config={}, summary={}, history=[])
    for path in sorted(folder.rglob("*.wandb")):
        for record in map(Record.FromString, records(path)):
            if record.HasField("run"):
                found.ids.append(record.run.run_id)
                found.groups.append(record.run.run_group)
                found.tags.append(list(record.run.tags))
                found.notes.append(record.run.notes)
                found.config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
            found.summary |= {key(u): json.loads(u.value_json) for u in record.summary.update}
            if record.HasField("history"):
                row = {key(i): json.loads(i.value_json) for i in record.history.item}
                found.history.append((record.history.step.num, row))
    return found


def key(item) -> str:
    return item.key or ".".join(item.nested_key)


def test_wandb_gets_every_row_under_its_step_and_the_config_and_keeps_its_id(tmp_path):
    first = run(tmp_path, wandb=OFFLINE, max_steps=8)
    first.metrics.finish()
    second = run(tmp_path, wandb=OFFLINE, max_steps=12, ckpt=checkpoint.find(tmp_path))
    second.trainer.test(second.task, datamodule=second.data, verbose=False)
    second.metrics.finish()
    found = read_wandb(tmp_path / "wandb")
    assert set(found.ids) == {"abc123"} and len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    assert {k: v for k, v in found.config.items() if k != "_wandb"} == first.task.identity["config"]
    steps = [step for step, _ in found.history]
    assert steps == sorted(steps) == [2, 4, 6, 8, 10, 12]
    logged = {step: {k: v for k, v in row.items() if not k.startswith("_")} for step, row in found.history}
    for row in rows(tmp_path)[:-1]:
        step = int(row.pop("step"))
        assert {k: float(v) for k, v in row.items()}.items() <= logged[step].items()
    assert logged[12]["test/loss"] == 0.5
    assert rows(tmp_path)[-1]["test/loss"] == "0.5"


def test_two_jobs_in_one_process_are_two_runs(tmp_path):
    for name in ("a", "b"):
        tracker = Wandb(tmp_path / name, id=f"run-{name}", config={"name": name})
        tracker.log({"x": 1.0}, step=1)
    tracker.finish()
    for name in ("a", "b"):
        found = read_wandb(tmp_path / name)
        assert (set(found.ids), found.config["name"], len(found.history)) == ({f"run-{name}"}, name, 1)


def test_a_run_is_shown_as_it_was_configured(words, tmp_path, monkeypatch):
    """The config of config.yaml, free text in it too; tags, notes, group; what it was started in as summary."""
    monkeypatch.chdir(tmp_path)
    who = ("-c", "user.name=a", "-c", "user.email=b")
    for command in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-mc")):
        subprocess.run(["git", *command], check=True)
    more = ("logger.wandb.mode=offline", "logger.wandb.notes=${x}, 'quoted'", "logger.wandb.group=lr", "tags=one,two")
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", "trainer.max_steps=3", *more)))
    found = read_wandb(tmp_path / "run")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert {name: value for name, value in found.config.items() if name != "_wandb"} == config
    assert config["logger"]["wandb"]["notes"] == "${x}, 'quoted'" == found.notes[0]
    assert (found.groups[0], found.tags[0]) == ("lr", ["one", "two"])
    (start,) = (tmp_path / "run" / "environment.jsonl").read_text(encoding="utf-8").splitlines()
    assert {"first_step": 0, **found.summary["environment"]} == json.loads(start)
    assert json.loads(start)["git"] == {"commit": lmzoo.environment.revision()["commit"], "dirty": False}
    assert [step for step, _ in found.history] == [1, 2, 3] and "train/perplexity" in found.history[0][1]


@pytest.mark.parametrize(("watch", "kinds"), [("gradients", {"gradients"}), ("all", {"gradients", "parameters"})])
def test_histograms_change_no_number(tmp_path, watch, kinds):
    """Of every weight at every third step, in the rows' own steps; the weights are those of a run without."""
    plain = run(tmp_path / "plain", max_steps=8)
    watched = run(tmp_path / "watched", max_steps=8, wandb=OFFLINE | {"watch": watch, "watch_every_n_steps": 3})
    watched.metrics.finish()
    assert same(plain, watched) and rows(tmp_path / "plain") == rows(tmp_path / "watched")
    history = read_wandb(tmp_path / "watched").history
    assert [step for step, _ in history] == [2, 3, 4, 6, 8]
    names = {f"{kind}/{name}" for kind in kinds for name in ("weight", "bias")}
    for step, row in history:
        seen = {name.removesuffix(".values"): sum(row[name]) for name in row if name.endswith(".values")}
        assert set(seen) == (names if step % 3 == 0 else set())
        assert all(n == {"weight": 3, "bias": 1}[name.split("/")[1]] for name, n in seen.items())


def test_a_histogram_of_what_is_not_finite(tmp_path):
    net = torch.nn.Linear(2, 1)
    net.weight.data = torch.tensor([[torch.nan, 2.0]])
    net.bias.data = torch.tensor([torch.inf])
    tracker = Wandb(tmp_path, watch="parameters", watch_every_n_steps=1)
    tracker.watch(net, step=1)
    tracker.finish()
    ((_, row),) = read_wandb(tmp_path).history
    assert sum(row["parameters/weight.values"]) == 1 and "parameters/bias.values" not in row


def warnings(caplog) -> list[str]:
    """What was warned of, up to the reason."""
    return [record.message.partition(" (")[0] for record in caplog.records if record.levelno >= logging.WARNING]


def kill_wandb(trainer) -> None:
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
    assert children.stdout
    for pid in children.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def occupy(folder: Path) -> None:
    (folder / "wandb").touch()


def lead_nowhere(folder: Path) -> None:
    (folder / "wandb").symlink_to("/proc/wandb")  # where nobody may make a folder


@pytest.mark.parametrize("trouble", ["killed at step 5", 20000, 3000, occupy, lead_nowhere])
def test_trouble_with_wandb_is_one_warning_and_the_same_run(tmp_path, trouble, caplog, capfd):
    """A file-size limit that wandb's process inherits cuts its file as a full disk does: without an error."""
    plain, folder, more = run(tmp_path / "plain"), tmp_path / "run", []
    folder.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "killed at step 5":
        more = [At(5, kill_wandb)]
    elif isinstance(trouble, int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (trouble, hard))
        more = [At(1, lambda trainer: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))]
    else:
        trouble(folder)
    try:
        parts = run(folder, *more, wandb=OFFLINE | {"notes": "long" * 10000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    parts.metrics.finish()
    parts.metrics.finish()
    assert warnings(caplog) == ["wandb failed"]
    assert same(plain, parts) and rows(folder) == rows(tmp_path / "plain")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_whose_wandb_was_killed_ends_quietly(tmp_path):
    """wandb's own hook at exit would print a traceback."""
    script = (
        "import logging, sys; sys.path[:0] = sys.argv[2:]; logging.basicConfig(); import test_tracking as t; "
        "t.run(t.Path(sys.argv[1]), t.At(5, t.kill_wandb), wandb=t.OFFLINE).metrics.finish()"
    )
    words = [os.sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stderr.count("wandb failed") == 1


def test_online_without_an_account_is_kept_offline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    parts = run(tmp_path / "run", wandb=OFFLINE | {"mode": "online"}, max_steps=4)
    parts.metrics.finish()
    assert warnings(caplog) == ["wandb is not online"]
    assert [step for step, _ in read_wandb(tmp_path / "run").history] == [2, 4]


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_wandb_reports_its_first_failure_and_goes_quiet(tmp_path, monkeypatch, caplog, moment):
    import wandb

    def broken(*_, **__):
        raise ConnectionResetError("the helper is gone")

    file = tmp_path / "run.wandb"
    file.touch()
    fake = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None, settings=SimpleNamespace(sync_file=file))
    if moment != "init":
        setattr(fake, moment, broken)
    monkeypatch.setattr(wandb, "init", broken if moment == "init" else lambda **_: fake)
    with caplog.at_level(logging.WARNING):
        parts = run(tmp_path, wandb={"mode": "offline"}, max_steps=8)
        parts.metrics.finish()
        parts.metrics.finish()
    assert caplog.text.count("wandb failed (ConnectionResetError: the helper is gone)") == 1
    assert len(rows(tmp_path)) == 4


def test_disabled_wandb_writes_nothing(tmp_path):
    run(tmp_path, wandb={"mode": "disabled"}, max_steps=2)
    assert not (tmp_path / "wandb").exists()


def test_tensorboard_has_the_rows(tmp_path):
    """A run that goes on hides the rows beyond its checkpoint."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, max_steps=10, tensorboard=True).metrics.finish()
    run(tmp_path, max_steps=12, tensorboard=True, ckpt=tmp_path / "checkpoints/step-000008.ckpt").metrics.finish()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    table = rows(tmp_path)
    for name in ("train/loss", "val/loss", "grad_norm"):
        expected = [(int(row["step"]), np.float32(row[name])) for row in table if name in row]
        assert [(event.step, np.float32(event.value)) for event in events.Scalars(name)] == expected


def test_tensorboard_that_is_not_there_is_refused_and_one_that_fails_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"logger.tensorboard=true needs .* pip install 'lmzoo\[tensorboard\]'$"):
        TensorBoard.require()
    (tmp_path / "tensorboard").touch()
    tracker = TensorBoard(tmp_path)
    tracker.log({"a": 1.0}, step=1)
    tracker.finish()
    assert caplog.text.count("TensorBoard failed") == 1


def same(one, other) -> bool:
    """Whether two runs ended with equal weights."""
    return all(torch.equal(a, b) for a, b in zip(one.task.net.parameters(), other.task.net.parameters(), strict=True))
