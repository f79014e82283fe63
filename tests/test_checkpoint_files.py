"""What a damaged, refused or killed write leaves behind; a checkpoint as a file, and as a folder of shares."""

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

import lmzoo
from lmzoo import UserError, checkpoint


def damage(path: Path) -> None:
    """One bit of it flips on the disk."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_manifest_has_the_sha256_of_the_file_on_disk(tmp_path):
    file = tmp_path / "a.ckpt"
    checkpoint.write({"x": torch.arange(10000)}, file)
    digest = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout.split()[0]
    assert json.loads((tmp_path / "MANIFEST.json").read_text()) == {"a.ckpt": digest}
    assert torch.equal(checkpoint.read(file)["x"], torch.arange(10000))


def test_a_damaged_checkpoint_is_passed_over_by_name_for_the_newest_whole_one(tmp_path, caplog):
    folder = tmp_path / "run/checkpoints"
    for step in (1, 2, 3):
        checkpoint.write({"step": step, "x": torch.zeros(1000)}, folder / f"step-00000{step}.ckpt")
    checkpoint.link(folder / "step-000003.ckpt", "last.ckpt")
    assert checkpoint.find(tmp_path / "run").name == "last.ckpt"
    damage(folder / "last.ckpt")  # and with it step 3, which is the same file
    assert checkpoint.find(tmp_path / "run") == folder / "step-000002.ckpt"
    (line,) = caplog.messages
    assert "damaged" in line and line.endswith("last.ckpt, step-000003.ckpt; taking step-000002.ckpt")
    with pytest.raises(UserError, match="step-000003.ckpt is damaged"):
        checkpoint.read(folder / "step-000003.ckpt")
    for name in checkpoint.names(folder)[:2]:
        damage(folder / name)
    with pytest.raises(UserError, match=r"no whole checkpoint .*damaged: last.ckpt, .*step-000001.ckpt"):
        checkpoint.find(tmp_path / "run")


SPREAD = {
    "state_dict": {"net.a.weight": torch.randn(3, 2), "net.b": torch.zeros(())},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 2), "plain": 1}, 1: {}},
                          "param_groups": [{"lr": 0.1, "params": [0, 1]}]}],
    "global_step": 3, "lmzoo": {"version": "0"},
}  # fmt: skip


def same(one, two) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(value, two[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_a_folder_of_shares_is_found_read_linked_and_removed_as_a_file_is(tmp_path, caplog):
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    for step in (1, 2):
        checkpoint.write_shares(SPREAD | {"global_step": step}, folder / f"step-{step}.ckpt")
    assert same(checkpoint.read(folder / "step-2.ckpt"), SPREAD | {"global_step": 2})
    assert checkpoint.read(folder / "step-2.ckpt", tensors=False)["lmzoo"] == {"version": "0"}
    for _ in range(2):
        checkpoint.link(folder / "step-2.ckpt", "last.ckpt")
    assert checkpoint.find(tmp_path / "run") == folder / "last.ckpt" == checkpoint.find(folder / "last.ckpt")
    damage(next((folder / "last.ckpt").glob("*.distcp")))  # and with it step 2, which is the same
    assert checkpoint.find(tmp_path / "run") == folder / "step-1.ckpt"
    assert caplog.messages[0].endswith("last.ckpt, step-2.ckpt; taking step-1.ckpt")
    with pytest.raises(UserError, match="step-2.ckpt is damaged"):
        checkpoint.read(folder / "step-2.ckpt")
    for name in ("last.ckpt", "step-2.ckpt"):
        checkpoint.remove(folder / name)
    assert sorted(path.name for path in folder.iterdir()) == ["MANIFEST.json", "step-1.ckpt"]


@pytest.mark.parametrize("first", [checkpoint.write, checkpoint.write_shares])
@pytest.mark.parametrize("second", [checkpoint.write, checkpoint.write_shares])
def test_a_file_and_a_folder_take_each_others_place(tmp_path, first, second):
    for step, write in ((1, first), (2, second)):
        write(SPREAD | {"global_step": step}, tmp_path / "a.ckpt")
        checkpoint.link(tmp_path / "a.ckpt", "last.ckpt")
    for name in ("a.ckpt", "last.ckpt"):
        assert same(checkpoint.read(tmp_path / name), SPREAD | {"global_step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt", "last.ckpt"]


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    checkpoint.write_shares(SPREAD, tmp_path / "a.ckpt")
    monkeypatch.setattr(checkpoint.folders, "rest", lambda state: (_ for _ in ()).throw(OSError("No space left")))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write_shares(SPREAD | {"global_step": 4}, tmp_path / "a.ckpt")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt"]
    assert same(checkpoint.read(tmp_path / "a.ckpt"), SPREAD)


def test_a_link_is_the_same_file_and_outlives_the_first_name(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    for _ in range(2):
        checkpoint.link(tmp_path / "a.ckpt", "last.ckpt")
    assert os.path.samefile(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    checkpoint.remove(tmp_path / "a.ckpt")
    assert checkpoint.read(checkpoint.find(tmp_path)) == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "last.ckpt"]


def test_a_program_beside_a_checkpoint_is_in_nobodys_way(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "checkpoints/a.ckpt")
    for folder in tmp_path, tmp_path / "checkpoints":
        (folder / "model.onnx").touch()
        assert checkpoint.find(folder) == tmp_path / "checkpoints/a.ckpt"
    for path in tmp_path / "model.onnx", tmp_path / "checkpoints/model.onnx":
        with pytest.raises(UserError, match="model.onnx is an exported program, which onnxruntime runs without lmzoo"):
            checkpoint.find(path)


def test_last_is_the_newest_run_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="last: no run under runs/"):
        checkpoint.find("last")
    for age, run in enumerate(("b/new", "a/newest", "c/old")):
        checkpoint.write({}, Path("runs") / run / "checkpoints/last.ckpt")
        when = {"c/old": 100, "b/new": 200, "a/newest": 300}[run] + age
        os.utime(Path("runs") / run / "checkpoints/MANIFEST.json", (when, when))
    assert checkpoint.find("last") == Path("runs/a/newest/checkpoints/last.ckpt")


def test_last_passes_over_runs_that_a_living_process_trains(tmp_path, monkeypatch):
    """The lock of a process that was killed is no sign of life; a live run can still be named."""
    monkeypatch.chdir(tmp_path)
    for run in ("old", "new"):
        checkpoint.write({}, Path("runs") / run / "checkpoints/last.ckpt")
    Path("runs/old/.lock").touch()
    train = "import sys\nfrom filelock import FileLock\nwith FileLock(sys.argv[1]): print(flush=True), input()"
    living = []
    for run in ("new", "old"):
        assert checkpoint.find("last").parts[1] == run
        living.append(subprocess.Popen([sys.executable, "-c", train, f"runs/{run}/.lock"], stdin=-1, stdout=-1))
        living[-1].stdout.readline()
    assert checkpoint.find("runs/new").parts[1] == "new"
    with pytest.raises(UserError, match="each run under runs/ is in training at the moment; name one, as runs/new"):
        checkpoint.find("last")
    for process in living:
        process.kill(), process.wait()
    assert checkpoint.find("last").parts[1] == "new"


@pytest.mark.parametrize("content", ["[1, 2]", "", "{", '{"last.ckpt": 5}', "null", "3"])
def test_a_broken_manifest_is_said_to_be_one_and_names_the_files_that_are_there(tmp_path, content, caplog):
    folder = tmp_path / "run/checkpoints"
    checkpoint.write({"x": 1}, folder / "step-000001.ckpt")
    checkpoint.write({"x": 2}, folder / "last.ckpt")
    (folder / "short.ckpt").write_bytes((folder / "last.ckpt").read_bytes()[:-100])
    (folder / "MANIFEST.json").write_text(content)
    with pytest.raises(UserError, match="no whole checkpoint .*give one of its files by name: .*step-000001") as error:
        checkpoint.find(tmp_path / "run")
    said = f"{folder / 'MANIFEST.json'} cannot be read (it was cut short, or edited)"
    readable = content.startswith('{"')
    assert "short.ckpt" not in str(error.value) and (said in str(error.value)) != readable
    assert checkpoint.read(checkpoint.find(folder / "step-000001.ckpt")) == {"x": 1}
    warned = [] if readable else [f"{folder / 'step-000001.ckpt'} is not compared with its sha256: {said}"]
    assert caplog.messages == warned


def test_a_file_that_is_not_listed_leaves_the_manifest_as_it_is(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    checkpoint.write({"x": 2}, tmp_path / "b.ckpt", listed=False)
    assert checkpoint.names(tmp_path) == ["a.ckpt"] and checkpoint.find(tmp_path).name == "a.ckpt"
    assert checkpoint.read(tmp_path / "b.ckpt") == {"x": 2}


@pytest.mark.parametrize("call", [checkpoint.find, lmzoo.load])
def test_what_is_not_there_is_named(tmp_path, call):
    with pytest.raises(UserError, match="nothing does not exist"):
        call(tmp_path / "nothing")
    with pytest.raises(UserError, match="no whole checkpoint"):
        call(tmp_path)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"x": Path("not plain")}, tmp_path / "objects.ckpt")
    torch.save({"x": torch.zeros(1000)}, tmp_path / "short.ckpt")
    (tmp_path / "short.ckpt").write_bytes((tmp_path / "short.ckpt").read_bytes()[:2000])
    for name in ("text.ckpt", "short.ckpt"):
        with pytest.raises(UserError, match=f"{name} is not a whole checkpoint"):
            checkpoint.read(tmp_path / name)
    torch.save({"x": 1}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="other.ckpt is no checkpoint of lmzoo"):
        lmzoo.load(tmp_path / "other.ckpt")


def test_what_is_not_plain_is_not_written(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match="PosixPath|pathlib"):
        checkpoint.write({"x": Path("a")}, tmp_path / "a.ckpt")
    assert checkpoint.read(tmp_path / "a.ckpt") == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt"]


def test_a_full_disk_leaves_the_previous_checkpoint_whole_and_nothing_else(tmp_path):
    checkpoint.write({"x": 1}, tmp_path / "a.ckpt")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write({"x": torch.zeros(1_000_000)}, tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.read(tmp_path / "a.ckpt") == {"x": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MANIFEST.json", "a.ckpt"]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    script = (
        "import sys, torch\nfrom lmzoo import checkpoint as c\n"
        "x = torch.zeros(300_000)\n"
        "for i in range(10**6):\n"
        f"    c.write(dict(i=i, x=x), {str(tmp_path)!r} + f'/step-{{i:06d}}.ckpt')\n"
        f"    c.link({str(tmp_path)!r} + f'/step-{{i:06d}}.ckpt', 'last.ckpt')\n"
        f"    i and c.remove({str(tmp_path)!r} + f'/step-{{i - 1:06d}}.ckpt')\n"
        "    print(i, flush=True)\n"
    )
    for pause in (0.0, 0.013):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        seen = [int(process.stdout.readline()) for _ in range(3)][-1]
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        seen = max([seen, *map(int, process.stdout.read().split())])
        process.wait()
        state = checkpoint.read(checkpoint.find(tmp_path))
        assert state["i"] >= seen and len(state["x"]) == 300_000


def test_a_kill_at_each_line_leaves_a_whole_checkpoint(tmp_path):
    """At each line of ours and shutil's while one is saved, the last removed: the disk is as a kill leaves it."""
    checkpoint.write({"i": 1}, tmp_path / "step-1.ckpt")
    checkpoint.link(tmp_path / "step-1.ckpt", "last.ckpt")
    ours, found, before = {checkpoint.write.__code__.co_filename, shutil.__file__}, [], sys.gettrace()

    def look(_, event, __):
        if event == "line":
            found.append(checkpoint.read(checkpoint.find(tmp_path))["i"])
        return look

    sys.settrace(lambda frame, *_: look if frame.f_code.co_filename in ours else None)
    try:
        checkpoint.write({"i": 2}, tmp_path / "step-2.ckpt")
        checkpoint.link(tmp_path / "step-2.ckpt", "last.ckpt")
        checkpoint.remove(tmp_path / "step-1.ckpt")
    finally:
        sys.settrace(before)
    assert found == sorted(found) and {*found} == {1, 2} and len(found) > 50


@pytest.mark.parametrize("write", [checkpoint.write, checkpoint.write_shares])
def test_what_gets_its_name_is_on_the_disk_before_and_its_name_is_after(tmp_path, monkeypatch, write):
    """Each file is synced whole, then moved, then its folder is synced; the manifest follows when all that is done."""
    calls, sizes, first, sync, replace = [], {}, {}, os.fsync, os.replace  # by inode: how long a file was when synced

    def synced(number):
        there = os.fstat(number)
        place = next(p for p in (tmp_path, *tmp_path.rglob("*")) if p.stat().st_ino == there.st_ino)
        sizes[there.st_ino] = there.st_size
        calls.append(("sync", str(place.relative_to(tmp_path))))
        sync(number)

    def moved(source, target):
        calls.append(("move", Path(target).name))
        first.update(first or sizes)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    write({"state_dict": {"net.a": torch.zeros(2000)}, "optimizer_states": [], "x": 1}, tmp_path / "a.ckpt")
    parts = [p for p in (tmp_path / "a.ckpt", *(tmp_path / "a.ckpt").rglob("*")) if p.is_file()]
    assert first == {p.stat().st_ino: p.stat().st_size for p in parts}
    assert sizes[(tmp_path / "MANIFEST.json").stat().st_ino] == (tmp_path / "MANIFEST.json").stat().st_size
    assert calls[calls.index(("move", "a.ckpt")) :] == [
        ("move", "a.ckpt"), ("sync", "."), ("sync", "MANIFEST.json.tmp"), ("move", "MANIFEST.json"), ("sync", "."),
    ]  # fmt: skip



class Calls:
    """What a malicious file holds: opened as a pickle, it calls something."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("kind", ["file", "rest.pt", ".metadata"])
def test_a_file_that_would_call_something_is_not_opened(tmp_path, kind):
    """In each pickle that a checkpoint has; said in one line that does not advise to open it all the same."""
    path = tmp_path / "a.ckpt"
    state = {"state_dict": {"net.a": torch.zeros(2)}, "optimizer_states": [], "x": Calls(tmp_path / "called")}
    if kind == "file":
        torch.save(state, path)
    else:
        checkpoint.write_shares(state | {"x": 1}, path)
        if kind == "rest.pt":
            torch.save(state, path / kind)
        else:
            (path / kind).write_bytes(pickle.dumps(state["x"]))
        (tmp_path / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match=r"a.ckpt holds more than plain data \(posix.mkdir\): not opened; ") as refusal:
        checkpoint.read(path)
    assert "\n" not in str(refusal.value) and "weights_only" not in str(refusal.value)
    assert not (tmp_path / "called").exists()


def test_what_is_a_pickle_of_nothing_is_named(tmp_path):
    """The archive is whole, and what is in it is no pickle."""
    torch.save({"x": 1}, tmp_path / "a.ckpt")
    with zipfile.ZipFile(tmp_path / "a.ckpt") as before, zipfile.ZipFile(tmp_path / "b.ckpt", "w") as after:
        for name in before.namelist():
            after.writestr(name, b"\xff\xfe" if name.endswith("data.pkl") else before.read(name))
    with pytest.raises(UserError, match=r"b.ckpt is not a whole checkpoint of plain types: give a file") as refusal:
        checkpoint.read(tmp_path / "b.ckpt")
    assert "\n" not in str(refusal.value) and "weights_only" not in str(refusal.value)
