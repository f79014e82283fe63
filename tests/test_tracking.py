"""wandb's own file read back, and wandb failing at every moment."""

import json
import logging
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmzoo import checkpoint
from lmzoo.callbacks import Wandb
from small_run import rows, run


def records(path: Path):
    """The records of a .wandb file: LevelDB's log format, read as far as a torn file goes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    if content:
        assert content[:6] == struct.pack("<4sH", b":W&B", 0xBEE1)
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts = (b"" if kind in (1, 2) else parts) + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and length:
            record = Record()
            record.ParseFromString(parts)
            yield record


def read_wandb(folder: Path) -> SimpleNamespace:
    """What all finished runs below `folder` wrote; wandb's helper may still be writing when `finish` has returned."""
    files = sorted(folder.rglob("*.wandb"))
    for path in files:
        until = time.monotonic() + 20
        while not any(record.HasField("exit") for record in records(path)) and time.monotonic() < until:
            time.sleep(0.05)
    found = SimpleNamespace(ids=[], config={}, history=[])
    for record in (record for path in files for record in records(path)):
        if record.HasField("run"):
            found.ids.append(record.run.run_id)
            found.config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
        if record.HasField("history"):
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            found.history.append((record.history.step.num, row))
    return found


def test_wandb_gets_every_row_under_its_step_and_the_config_and_keeps_its_id(tmp_path):
    first = run(tmp_path, wandb={"mode": "offline", "project": "p"}, max_steps=8)
    first.metrics.finish()
    second = run(tmp_path, wandb={"mode": "offline", "project": "p"}, max_steps=12, ckpt=checkpoint.find(tmp_path))
    second.trainer.test(second.task, second.validation, verbose=False)
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


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_wandb_reports_its_first_failure_and_goes_quiet(tmp_path, monkeypatch, caplog, moment):
    import wandb

    def broken(*_, **__):
        raise ConnectionResetError("the helper is gone")

    fake = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
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
