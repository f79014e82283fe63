"""A run's folder that a hand has changed: what a resumed run writes to, what is refused, and that nothing is lost."""

import csv
import shutil

import pytest
import yaml

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
        lmzoo.fit(lmzoo.compose("task=clm", "data=text", f"init_from={folder}", f"run_dir={tmp_path / 'new'}"))


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
