"""What a run was started in: the git revision of the user's folder, and a line for each start."""

import json
import subprocess
import sys

from lmzoo.environment import describe, record, revision


def git(*words):
    who = ("-c", "user.name=a", "-c", "user.email=b@c")
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_revision_is_that_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert revision() is None
    git("init", "-q")
    assert revision() is None  # without a commit
    (tmp_path / "a.txt").write_text("one")
    git("add", "a.txt")
    git("commit", "-qm", "first")
    assert revision() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "new.txt").write_text("not tracked, as a folder of runs")
    assert not revision()["dirty"]
    (tmp_path / "a.txt").write_text("two")
    assert revision()["dirty"]
    monkeypatch.setenv("PATH", "")
    assert revision() is None


def test_each_start_is_a_line(tmp_path):
    found = describe(devices=2)
    assert {"command", "git", "python", "torch", "lmzoo", "device", "threads"} <= set(found)
    assert found["command"].startswith(sys.executable)
    for step in (0, 40):
        record(found, tmp_path / "environment.jsonl", step)
    lines = (tmp_path / "environment.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"first_step": step, **found} for step in (0, 40)]
