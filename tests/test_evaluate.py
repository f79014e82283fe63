"""The evaluate command: a run's own data, and other text."""

import math
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from lmzoo.tasks.base import Task

import lmzoo
from lmzoo import UserError, checkpoint
from lmzoo.evaluate import evaluate
from lmzoo.evaluate import main as command
from lmzoo.literal import prepared
from lmzoo.runs import finish
from lmzoo.schema import register
from marks import slow_but


def configured(*words):
    import hydra
    from omegaconf import open_dict

    register()
    with hydra.initialize_config_module("lmzoo.conf", version_base="1.3"):
        composed = hydra.compose("evaluate", prepared(words), return_hydra_config=True)
    settings = composed.hydra
    with open_dict(composed):
        del composed["hydra"]
    return finish(composed, settings, "evaluate")


def test_on_its_own_validation_split(gpt_run):
    """The numbers are those that training ended with."""
    import json

    trained = json.loads((gpt_run / "result.json").read_text())
    measured = evaluate(configured(f"ckpt={gpt_run}"))
    assert measured["val/loss"] == pytest.approx(trained["val/loss"], abs=1e-6)


@pytest.mark.parametrize("measure", [(), ("measure=sliding_window",)])
def test_which_run_the_last_is_is_said_once(gpt_run, measure, tmp_path, monkeypatch, caplog):
    """And it is one run, also where another has been saved meanwhile."""
    shutil.copytree(gpt_run, tmp_path / "runs/a/first")
    monkeypatch.chdir(tmp_path)
    config = configured("ckpt=last", *measure)
    shutil.copytree(gpt_run, tmp_path / "runs/a/second")
    assert "val/loss" in evaluate(config)
    assert caplog.messages == ["last is runs/a/first"] and config.ckpt == "runs/a/first/checkpoints/last.ckpt"


@pytest.mark.parametrize("measure", [(), ("measure=sliding_window",)])
def test_a_checkpoint_is_read_once(gpt_run, measure, monkeypatch):
    """After one look for the newest that is whole."""
    summed, usual = [], checkpoint.files._sha256
    monkeypatch.setattr(checkpoint.files, "_sha256", lambda path: summed.append(path.name) or usual(path))
    evaluate(configured(f"ckpt={gpt_run}", *measure))
    assert summed == ["last.ckpt", "last.ckpt"]


def test_other_text_is_read_whole(gpt_run, tmp_path):
    """Nats, perplexity and bits per byte of one short document, by hand from the net's logits."""
    text = "the cat sat on the mat, it's 5 °C"
    (tmp_path / "held out.txt").write_text(text, encoding="utf-8")
    measured = evaluate(configured(f"ckpt={gpt_run}", "data=text", f"data.path={tmp_path / 'held out.txt'}"))
    net = lmzoo.load(gpt_run)
    ids = torch.tensor(net.tokenizer.document(net.tokenizer.encode(text)))
    with torch.no_grad():
        nats = torch.nn.functional.cross_entropy(net(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    assert measured["test/loss"] == pytest.approx(nats / (len(ids) - 1), abs=1e-5)
    assert measured["test/perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)
    assert measured["test/bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-5)


def test_rows_beyond_the_positions_are_refused_before_the_text_is_read(gpt_run, corpus, monkeypatch):
    monkeypatch.setattr("lmzoo.data.prepare", lambda *_, **__: pytest.fail("read"))
    config = configured(f"ckpt={gpt_run}", "data=text", f"data.path={corpus}", "data.row_length=65")
    with pytest.raises(UserError, match="data.row_length=65 is more than the 64 positions of the model: give fewer$"):
        evaluate(config)


def test_labels_of_other_text_are_no_matter_of_a_task_without_any(gpt_run, tmp_path, monkeypatch):
    """Also where the text that the net was trained on had some."""
    read = checkpoint.read

    def of_labelled(*args, **words):
        trained = read(*args, **words)
        return trained | {"lmzoo": trained["lmzoo"] | {"labels": ["good", "bad"]}}

    monkeypatch.setattr(checkpoint.loading, "read", of_labelled)
    (tmp_path / "a.csv").write_text("text,label\nthe cat sat on the mat,other\n")
    assert "test/loss" in evaluate(configured(f"ckpt={gpt_run}", "data=csv", f"data.path={tmp_path / 'a.csv'}"))


def test_batch_size_changes_nothing(gpt_run, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} cats sat on a mat" for n in range(60)))
    words = (f"ckpt={gpt_run}", f"data.path={tmp_path / 'text.txt'}")
    one, many = (evaluate(configured(*words, f"data.batch_size={n}")) for n in (1, 7))
    assert one.keys() == many.keys() and one["test/loss"] == pytest.approx(many["test/loss"], abs=1e-6)


def test_the_nets_rows_are_kept_when_the_source_changes(gpt_run, corpus):
    config = configured(f"ckpt={gpt_run}", "data=text", f"data.path={corpus}", "data.batch_size=3")
    assert (config.data.row_length, config.data.batch_size, config.split) == (64, 3, "whole")


@pytest.mark.parametrize("word", ["batch_size=3", "micro_batch_size=2", "num_workers=1", "cache_dir=."])
def test_how_rows_are_read_is_no_other_text(gpt_run, word):
    """It is still the run's own validation that is measured, under the name that it has."""
    config = configured(f"ckpt={gpt_run}", f"data.{word}", "split=val")
    assert (config.split, config.data.path) == ("val", lmzoo.compose(f"ckpt={gpt_run}").data.path)
    if word.startswith("batch"):
        measured, before = (evaluate(configured(f"ckpt={gpt_run}", *more)) for more in ([f"data.{word}"], []))
        assert measured.keys() == before.keys() and measured == pytest.approx(before, rel=1e-4)


def test_an_exported_folder_has_no_run_to_evaluate(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is an exported folder: .* train init_from="):
        configured(f"ckpt={tmp_path}")


def test_limited_batches(gpt_run, tmp_path):
    """The loss of the first batch alone, and no bits per byte, which would be over bytes that were not read."""
    first, rest = "the cat sat on a mat", "rain fell over old hills"
    for name, texts in (("one.txt", [first]), ("all.txt", [first, rest, rest])):
        (tmp_path / name).write_text("\n\n".join(texts))
    words = (f"ckpt={gpt_run}", "data=text", "data.batch_size=1", "data.packing=single")
    one = evaluate(configured(*words, f"data.path={tmp_path / 'one.txt'}"))
    limited = evaluate(configured(*words, f"data.path={tmp_path / 'all.txt'}", "trainer.limit_val_batches=1"))
    assert limited["test/loss"] == pytest.approx(one["test/loss"], abs=1e-6)
    assert "test/bits_per_byte" in one and "test/bits_per_byte" not in limited


def test_the_runs_folder_is_left_alone(gpt_run):
    before = {path: path.read_bytes() for path in gpt_run.glob("*") if path.is_file()}
    evaluate(configured(f"ckpt={gpt_run}"))
    assert {path: path.read_bytes() for path in gpt_run.glob("*") if path.is_file()} == before


def test_mistakes(gpt_run):
    for words, line in [((), "no ckpt: say ckpt=RUN"), ((f"ckpt={gpt_run}", "split=test"), "split=test: the data has"),
                        (("ckpt=/nowhere",), "/nowhere does not exist"),
                        ((f"ckpt={gpt_run}", "split=train"), "split=train: it may be val or test, of the data that"),
                        ((f"ckpt={gpt_run}", "split=whole"), "split=whole: it may be val or test"),
                        ((f"ckpt={gpt_run}", "data.path=a.txt", "split=val"), "split=val: other text is read whole"),
                        ((f"ckpt={gpt_run}", "data=text", "split=val"), "split=val: other text is read whole"),
                        ((f"ckpt={gpt_run}", "data.field=x"), "data.field: name the source"),
                        ((f"ckpt={gpt_run}", "data=text", "data.field=x"), "data.field: Text has no such word"),
                        ((f"ckpt={gpt_run}", "data=text", "data.val_path=x"), "data.val_path changes nothing"),
                        ((f"ckpt={gpt_run}", "trainer.max_steps=5"), "trainer.max_steps changes nothing in an"),
                        ((f"ckpt={gpt_run}", "data=jsonl", "data.per_class=3"), "data.per_class changes nothing"),
                        ((f"ckpt={gpt_run}", "trainer.devices=0"), "trainer.devices=0 must be between"),
                        ((f"ckpt={gpt_run}", "data.path=/nowhere"), "matches no file")]:  # fmt: skip
        with pytest.raises(UserError) as refusal:
            evaluate(configured(*words))
        assert line in str(refusal.value)


def test_the_command_prints_one_line(gpt_run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lmzoo.evaluate", f"ckpt={gpt_run}"])
    command()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("val    loss ")


@pytest.mark.parametrize("mixed", slow_but([True], [False, True]))
def test_a_run_whose_data_has_changed_says_so(words, corpus, tmp_path, caplog, mixed):
    own = tmp_path / "own.txt"
    own.write_text(corpus.read_text())
    given = [word for word in words(tmp_path / "run", "model=gpt", "task=clm") if not word.startswith("data")]
    source = "data.sources.a." if mixed else "data."
    given += ["data=mixture", "data.sources.a.weight=2"] if mixed else ["data=text"]
    lmzoo.fit(lmzoo.compose(*given, f"{source}path={own}", "data.batch_size=4"))
    evaluate(configured(f"ckpt={tmp_path / 'run'}"))
    assert "has changed" not in caplog.text
    own.write_text(corpus.read_text() + "\n\none more text")
    if not mixed:
        evaluate(configured(f"ckpt={tmp_path / 'run'}", "data=text", f"data.path={own}"))
    assert "has changed" not in caplog.text
    evaluate(configured(f"ckpt={tmp_path / 'run'}"))
    assert caplog.text.count("the run's data has changed since it was trained") == 1


def test_a_run_is_not_measured_as_another(gpt_run, tmp_path):
    """Its task is the checkpoint's, whatever a hand has written into config.yaml."""
    shutil.copytree(gpt_run, tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content["task"]["_target_"] = "lmzoo.tasks.mlm.MaskedLM"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="config.yaml was edited: task._target_=lmzoo.tasks.mlm.MaskedLM"):
        evaluate(configured(f"ckpt={tmp_path / 'run'}"))


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(gpt_run):
    """And one of them prints it, whatever another program has left."""
    command = [sys.executable, "-m", "lmzoo.evaluate", f"ckpt={gpt_run}", "trainer.accelerator=cpu"]
    done = [subprocess.run([*command, *more], capture_output=True, text=True, env=os.environ | {"LOCAL_RANK": "1"})
            for more in ([], ["trainer=ddp", "trainer.devices=2"])]  # fmt: skip
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 2
    assert done[0].stdout == done[1].stdout and done[0].stdout.count("\n") == 1


@pytest.mark.parametrize("name, code, line", [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "ended by SIGTERM")])
def test_a_signal_is_told_of(gpt_run, monkeypatch, capsys, name, code, line):
    usual = Task.on_validation_epoch_start
    monkeypatch.setattr(Task, "on_validation_epoch_start", lambda task: (
        os.kill(os.getpid(), getattr(signal, name)), usual(task)))  # fmt: skip
    monkeypatch.setattr("sys.argv", ["lmzoo.evaluate", f"ckpt={gpt_run}"])
    with pytest.raises(SystemExit) as end:
        command()
    assert (end.value.code, capsys.readouterr()) == (code, ("", f"lmzoo: {line}\n"))
