"""A run's folder that a hand has changed: what a resumed run writes to, what is refused, and that nothing is lost."""

import csv
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

import lmzoo
from lmzoo import UserError, checkpoint


def no_data(monkeypatch):
    """What is refused after this is refused before a corpus is looked at."""
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("data was prepared"))


def edited(run, folder, **words):
    """A copy of a run in which a hand has changed config.yaml: `a__b=value` is a.b; None takes it away."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for word, value in words.items():
        *path, last = word.split("__")
        node = config
        for name in path:
            node = node[name]
        node.pop(last) if value is None else node.update({last: value})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def last(folder):
    """(the step of the last row, that of the newest checkpoint)."""
    with open(folder / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    return steps[-1], checkpoint.read(checkpoint.find(folder))["global_step"]


def files(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_resumed_run_writes_only_where_it_was_resumed_from(gpt_run, tmp_path, monkeypatch):
    """Whatever its config.yaml says of other places."""
    monkeypatch.chdir(tmp_path)
    before = files(gpt_run)
    for name, words in {"a": {"run_dir": "elsewhere"},
                        "b": {"callbacks__metrics__folder": "elsewhere", "callbacks__checkpoints__folder": "elsewhere",
                              "callbacks__guard__folder": "elsewhere"}}.items():  # fmt: skip
        folder = edited(gpt_run, tmp_path / name, **words)
        lmzoo.fit(lmzoo.compose(f"ckpt={folder}", "trainer.max_steps=7"))
        assert last(folder) == (7, 7)
    assert files(gpt_run) == before and {path.name for path in tmp_path.iterdir()} == {"a", "b"}


EDITS = {
    "optim__optimizer": {"_target_": "torch.optim.SGD", "_partial_": True}, "optim__lr": 1.0, "seed": 7,
    "compile": True, "schedule__end": 0.5, "task__z_loss": 0.1,
    "task___target_": "lmzoo.tasks.mlm.MaskedLM", "model__d_model": 64,
    "model__n_layers": 3, "model__dropout": 0.2, "model___target_": "lmzoo.models.Encoder", "data__batch_size": 8,
    "data__packing": "fit", "tokenizer__sample_mb": 1.0, "callbacks": None, "callbacks__guard": None,
}  # fmt: skip


@pytest.mark.parametrize("word", EDITS)
def test_a_run_does_not_go_on_as_another(gpt_run, tmp_path, monkeypatch, word):
    """Each section of config.yaml that says what the run is, against the checkpoint's own; before any data is read."""
    folder = edited(gpt_run, tmp_path / "run", **{word: EDITS[word]})
    no_data(monkeypatch)
    before = files(folder)
    with pytest.raises(UserError, match="config.yaml was edited: " + word.replace("__", r"\.", 1)) as refusal:
        lmzoo.fit(lmzoo.compose(f"ckpt={folder}", "trainer.max_steps=9"))
    assert "\n" not in str(refusal.value) and files(folder) == before


def test_what_makes_no_other_run_may_be_edited(gpt_run, tmp_path, corpus):
    """A corpus that has moved is known by its content."""
    moved = tmp_path / corpus.name
    moved.write_bytes(corpus.read_bytes())
    folder = edited(gpt_run, tmp_path / "run", data__path=str(moved), data__num_workers=1, trainer__max_steps=7)
    lmzoo.fit(lmzoo.compose(f"ckpt={folder}"))
    assert last(folder) == (7, 7)


def test_a_net_is_not_started_from_as_another(gpt_run, tmp_path, words, monkeypatch):
    """Four heads in place of two fit the weights, and are another net."""
    folder = edited(gpt_run, tmp_path / "run", model__n_heads=4)
    no_data(monkeypatch)
    with pytest.raises(UserError, match="config.yaml was edited: model.n_heads=4, the checkpoint's run has 2; undo"):
        lmzoo.fit(lmzoo.compose("task=clm", f"init_from={folder}", f"run_dir={tmp_path / 'new'}"))


TABLES = {
    b"\x80\xff\n\x00": 1, b"no table\n": 1, b"no table": 1, b"6,0.1,99,5.0\n7,0.2,120,4.0\n": 1,
    b"step,lr\n1,0.1,2\n": 2, b"step,lr\n1,0.1\n,0.2\n": 3, b"step,lr\n1,high\n": 2,
}  # fmt: skip


@pytest.mark.parametrize("content", TABLES)
def test_a_damaged_record_stays_as_it_is(gpt_run, tmp_path, monkeypatch, content):
    """Refused with the file and the line before any data is read; nothing is written over it."""
    folder = edited(gpt_run, tmp_path / "run")
    (folder / "metrics.csv").write_bytes(content)
    no_data(monkeypatch)
    line = rf"metrics.csv is not the table of a run \(line {TABLES[content]}: .*\): mend it, or move it away"
    with pytest.raises(UserError, match=line) as refusal:
        lmzoo.fit(lmzoo.compose(f"ckpt={folder}", "trainer.max_steps=9"))
    assert "\n" not in str(refusal.value) and (folder / "metrics.csv").read_bytes() == content


def test_a_folder_that_may_not_be_written_to(gpt_run, tmp_path, words, monkeypatch):
    """A new run's and one that goes on, while the configuration is composed."""
    monkeypatch.setattr("os.access", lambda place, mode: False)
    for given in (words(tmp_path / "a" / "b", "model=gpt", "task=clm"), [f"ckpt={gpt_run}"]):
        with pytest.raises(UserError, match="run_dir=.*: nothing may be written in .*; give another folder"):
            lmzoo.compose(*given)


def test_a_folder_whose_name_no_disk_takes(words, tmp_path):
    with pytest.raises(UserError, match="no name may be longer than 255 bytes"):
        lmzoo.compose(*words(tmp_path / ("é" * 128), "model=gpt", "task=clm"))


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json", "result.json", "loss.png"])
def test_files_that_no_run_has_written_are_not_written_over(words, tmp_path, name):
    """Another's configuration, or one of these files without a run's beside it."""
    (tmp_path / name).write_text("model: mine\n")
    with pytest.raises(UserError, match=f"run_dir=.* holds {name}, which no run has written and"):
        lmzoo.compose(*words(tmp_path, "model=gpt", "task=clm"))
    assert files(tmp_path) == {tmp_path / name: b"model: mine\n"}


def test_a_folder_that_another_run_has_taken_meanwhile(gpt_run, words, tmp_path, monkeypatch):
    """It began and ended between this one's first look at the folder and its taking it."""
    folder = tmp_path / "run"
    monkeypatch.setattr("lmzoo.train.check_free", lambda path: shutil.copytree(gpt_run, folder))
    config = lmzoo.compose(*words(folder, "model=gpt", "task=clm"))
    with pytest.raises(UserError, match="holds a run already: go on with it by ckpt="):
        lmzoo.fit(config)
    assert {path.relative_to(folder): content for path, content in files(folder).items() if path.name != ".lock"} == {
        path.relative_to(gpt_run): content for path, content in files(gpt_run).items() if path.name != ".lock"}


def test_a_rank_that_another_program_has_left_counts_for_nothing(gpt_run, words, tmp_path, monkeypatch):
    """A run is refused, made, and evaluated as ever, and finds its environment as it was."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NODE_RANK", "2")
    config = lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", "trainer.max_steps=1"))
    with pytest.raises(UserError, match="holds a run already"):
        lmzoo.fit(OmegaConf.merge(config, {"run_dir": str(gpt_run)}))
    lmzoo.fit(config)
    assert {"config.yaml", "tokenizer.json", "metrics.csv", "result.json"} <= {file.name for file in
                                                                             (tmp_path / "run").iterdir()}
    assert os.environ["LOCAL_RANK"] == "1" and os.environ["NODE_RANK"] == "2"


QUICK = {
    "run_dir": "run_dir=.* holds a run already", "data.path=none/*.txt": "data.path=none/.* matches no file",
    "~data.path": "data.path is not set", "data.val_path.a=none.txt": "data.val_path.a=none.txt matches no file",
    "trainer.max_time=3": "trainer.max_time=3: write DD:HH:MM:SS, as 00:08:00:00 for eight hours",
    "checkpoint.monitor=abc": "checkpoint.monitor=abc: give a metric of validation, as val/loss",
}  # fmt: skip


@pytest.mark.parametrize("word", QUICK)
def test_what_files_tell_is_said_before_a_folder_is_made_or_torch_imported(gpt_run, words, tmp_path, word):
    folder = gpt_run if word == "run_dir" else tmp_path / "run"
    given = words(folder, "model=gpt", "task=clm", *([word] if "=" in word else []))
    given = [one for one in given if not (word == "~data.path" and one.startswith("data.path"))]
    script = ("import sys; from lmzoo.train import main\ntry: main()\n"
              "finally: sys.stderr.write(str('torch' in sys.modules))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script, *given], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, (tmp_path / "run").exists()) == (2, "", False)
    assert re.fullmatch(f"lmzoo: {QUICK[word]}[^\n]*\nFalse", done.stderr)
