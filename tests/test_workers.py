"""Preparation in several processes, and what may befall them."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmzoo.data import corpus as readers
from lmzoo.data import sources, workers
from lmzoo.data.corpus import Text
from lmzoo.data.preparation import prepare
from lmzoo.errors import UserError
from marks import slow_but
from small_store import settings, texts
from test_preparation import BOS, EOS, TOKENIZER, small_parts  # noqa: F401
from test_sources import LINES, held_out

N_FILES = 6
DEEDS = {"die": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: os._exit(3), "fail": lambda: 1 / 0,
         "wait": lambda: time.sleep(60), "print": lambda: print("{}")}


@dataclass(frozen=True)
class Meddler(Text):
    """A reader that does what the file "deed" beside the corpus says when it comes to the second document of 3.txt."""

    split: str = "line"

    def read(self, piece):
        deed = Path(piece.file).parent.parent / "deed"
        for number, document in enumerate(super().read(piece)):
            if number == 1 and piece.file.endswith("3.txt") and deed.exists():
                DEEDS[deed.read_text()]()
            yield document


@pytest.fixture
def several(tmp_path, monkeypatch):
    """several(processes) -> configuration: six files, each a part; and what the store of them must hold."""
    monkeypatch.setattr(sources, "PART_MB", (0.001, 0.001))
    (tmp_path / "corpus").mkdir()
    for number in range(N_FILES):
        (tmp_path / "corpus" / f"{number}.txt").write_text("\n".join(LINES[number::N_FILES]))
    ordered = [line for number in range(N_FILES) for line in LINES[number::N_FILES]]
    expected = {"train": [line for line in ordered if not held_out(line, 0.1)],
                "val": [line for line in ordered if held_out(line, 0.1)]}

    def make(processes, **data):
        return settings(tmp_path, f"{__name__}.Meddler", {}, path=str(tmp_path / "corpus"), processes=processes, **data)

    make.deed, make.expected = tmp_path / "deed", expected
    return make


def finished(tmp_path):
    """The finished parts of an interrupted preparation, by when they were written."""
    return {file.name: file.stat().st_mtime_ns for file in (tmp_path / "cache" / "stores").glob("*/part-*.json")}


@pytest.mark.parametrize("piece_mb", [0.0002, 64])
def test_any_number_of_processes_writes_the_same(tmp_path, monkeypatch, piece_mb):
    monkeypatch.setattr(readers, "PIECE_MB", piece_mb)
    monkeypatch.setattr(sources, "PART_MB", (0.001, 0.001))
    (tmp_path / "a.txt").write_text("\n".join(LINES[:300]))
    (tmp_path / "b.txt").write_text("\n".join(LINES[300:]))
    files = {}
    for processes in (1, 2, 3):
        words = {"path": [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], "deduplicate": processes == 3}
        config = settings(tmp_path / str(processes), processes=processes, **words)
        store = prepare(config | {"task": {"whole_word": True}}, TOKENIZER)
        store.verify()
        files[processes] = {file.name: file.read_bytes() for file in store.folder.glob("*.shard")}
        for name in ("train", "val"):
            chosen = [line for line in LINES if held_out(line, 0.1) == (name == "val")]
            stream = sum(([BOS, *TOKENIZER.encode(line), EOS] for line in chosen), [])
            assert store[name].read(0, store[name].n_tokens).tolist() == stream
    assert files[1] == files[2] == files[3] and len(files[1]) > (10 if piece_mb < 1 else 2)


def test_documents_with_labels_over_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE_MB", 0.0005)
    monkeypatch.setattr(sources, "PART_MB", (0.001, 0.001))
    draw = random.Random(0)
    rows = [(line, draw.choice(["z", "b", None, "a"])) for line in LINES]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in rows))
    store = prepare(settings(tmp_path, "lmzoo.data.corpus.Jsonl", {}, path=str(tmp_path / "a.jsonl"), processes=2),
                    TOKENIZER)
    assert store.labels == ["a", "b", "z"] and len(store["train"].shards) > 5
    for name in ("train", "val"):
        labels = [label for text, label in rows if held_out(text, 0.1) == (name == "val")]
        found = [store[name].label(i) for i in range(store[name].n_documents)]
        assert [None if label is None else store.labels[label] for label in found] == labels
        assert store[name].n_unlabelled == labels.count(None)


@pytest.mark.parametrize(("deed", "message"), [
    ("die", r"part 3 of the source, from .*3.txt at 0, failed: its process was killed by signal 9"),
    ("exit", r"part 3 of the source, from .*3.txt at 0, failed: its process ended with code 3")])
def test_a_worker_that_dies_is_one_line_and_costs_one_part(tmp_path, several, deed, message):
    several.deed.write_text(deed)
    with pytest.raises(UserError, match=message):
        prepare(several(2), TOKENIZER)
    kept = finished(tmp_path)
    assert len(kept.keys() & {f"part-{number:05}.json" for number in range(3)}) >= 2 and "part-00003.json" not in kept
    several.deed.unlink()
    store = prepare(several(2), TOKENIZER)
    assert texts(store, TOKENIZER) == several.expected
    assert kept.items() <= finished(tmp_path).items() and len(finished(tmp_path)) == N_FILES


def test_a_mistake_in_a_worker_is_the_same_line(tmp_path, several):
    (tmp_path / "corpus" / "3.txt").write_bytes(b"\n".join(line.encode() for line in LINES[:99]) + b"\xff")
    for processes in (1, 2):
        with pytest.raises(UserError, match="^[^\n]*3.txt is not UTF-8: byte 0xff at offset [^\n]*$"):
            prepare(several(processes), TOKENIZER)


def test_a_fault_of_a_reader_shows_where_it_is(several):
    several.deed.write_text("fail")
    with pytest.raises(RuntimeError, match="(?s)Traceback.*in read.*ZeroDivisionError"):
        prepare(several(2), TOKENIZER)


def test_what_a_reader_prints_does_no_harm(several):
    several.deed.write_text("print")
    assert texts(prepare(several(2), TOKENIZER), TOKENIZER) == several.expected


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_named_and_harmless(several, processes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match="^cannot prepare [^\n]*File too large[^\n]*data.cache_dir names"):
            prepare(several(processes), TOKENIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = prepare(several(processes), TOKENIZER)
    store.verify()
    assert texts(store, TOKENIZER) == several.expected


def start(config, before="pass"):
    """Another process that prepares, and says of which parts it made the shards in this one."""
    code = f"""
import sys
from lmzoo.data import sources, workers
from test_workers import TOKENIZER, prepare
sources.PART_MB = (0.001, 0.001)
tokenise = workers.Workshop._tokenise
workers.Workshop._tokenise = lambda self, job, *args: print(job["part"]) or tokenise(self, job, *args)
{before}
print(prepare({config!r}, TOKENIZER).folder.name)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment)


def lines_until(stream, word):
    for line in stream:
        if word in line:
            return True
    return False


def test_two_that_prepare_at_once_prepare_once(several):
    several.deed.write_text("wait")
    slow = f"import os, time; time.sleep = lambda seconds, old=time.sleep: " \
           f"[old(0.05) for _ in iter(lambda: os.path.exists({str(several.deed)!r}), False)]"
    first = start(several(1), slow)
    for _ in range(4):
        assert first.stdout.readline().strip() in "0123"  # it holds the lock, and waits in part 3
    second = start(several(1))
    assert lines_until(second.stderr, "another process is preparing")
    several.deed.unlink()
    out = [run.communicate(timeout=60)[0].split() for run in (first, second)]
    assert out[0][:2] == ["4", "5"] and len(out[1]) == 1 and out[0][-1] == out[1][-1]
    assert first.returncode == second.returncode == 0


@pytest.mark.parametrize("processes", slow_but([1], [1, 2]))
def test_killed_again_and_again(tmp_path, several, processes):
    draw, seen = random.Random(processes), {}
    slow = "import time; write = workers.ShardWriter.close\n" \
           "workers.ShardWriter.close = lambda self: time.sleep(0.05) or write(self)"
    config = several(processes, deduplicate=processes == 2)
    for _ in range(5):
        run = start(config, slow)
        deadline = time.monotonic() + 60  # until it has begun, and then some
        while not list((tmp_path / "cache").glob("stores/*.partial/*")) and run.poll() is None:
            assert time.monotonic() < deadline
        time.sleep(draw.uniform(0, 0.3))
        run.kill()
        run.communicate()
        now = finished(tmp_path)
        assert seen.items() <= now.items()  # nothing that was finished was made again
        seen = now
    run = start(config)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert seen.items() <= finished(tmp_path).items() and len(finished(tmp_path)) == N_FILES
    store = prepare(config, TOKENIZER)
    store.verify()
    assert texts(store, TOKENIZER) == several.expected
    assert {file.suffix for file in store.folder.iterdir()} == {".json", ".shard"}
    assert not [file for file in store.folder.parent.iterdir() if file.is_dir() and file != store.folder]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended


def test_workers_end_with_their_parent(several):
    several.deed.write_text("wait")
    told = "popen = workers.subprocess.Popen\nworkers.subprocess.Popen = lambda *a, **k: " \
           "(lambda made: print('pid', made.pid, flush=True) or made)(popen(*a, **k))"
    run = start(several(2), told)
    workers_of = [int(run.stdout.readline().split()[1]) for _ in range(2)]
    assert all(map(alive, workers_of))
    run.kill()
    run.communicate()
    deadline = time.monotonic() + 30
    while any(map(alive, workers_of)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_worker_imports_no_torch():
    code = """
import sys
from lmzoo.data.workers import Workshop
from lmzoo.tokenizer import byte
tokenizer, reader = byte((), 512), {"_target_": "lmzoo.data.tables.Parquet"}
Workshop({"data": {"reader": reader}, "tokenizer": [tokenizer.json, tokenizer.special], "folder": ".", "kind": None})
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_few_parts_need_no_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "Worker", None)
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    config = settings(tmp_path, path=str(tmp_path / "a.txt"), processes=8)
    assert prepare(config, TOKENIZER).splits == ["train", "val"]
