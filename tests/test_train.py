"""A run from the command's words to its folder; `test_resume.py` goes on with one."""

import csv
import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

import lmzoo
from lmzoo import UserError, checkpoint, parts
from lmzoo.literal import plain
from lmzoo.train import main


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def command(*words, name="train", **environment):
    return subprocess.run(
        [sys.executable, "-m", f"lmzoo.{name}", *words], capture_output=True, text=True, env=os.environ | environment
    )


def test_a_run_folder_holds_what_it_should(gpt_run):
    names = {path.name for path in gpt_run.iterdir()}
    assert names >= {"config.yaml", "tokenizer.json", "metrics.csv", "loss.png", "checkpoints", "result.json"}
    files = {path.name for path in (gpt_run / "checkpoints").iterdir()}
    assert files >= {"last.ckpt", "step-000006.ckpt", "MANIFEST.json"}
    config = yaml.safe_load((gpt_run / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 400 and "${" not in (gpt_run / "config.yaml").read_text()
    assert [int(row["step"]) for row in rows(gpt_run)] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_carries_the_runs_identity(gpt_run):
    state = checkpoint.read(checkpoint.find(gpt_run))
    assert set(state["lmzoo"]) >= {"config", "tokenizer", "labels", "wandb_id", "version"}
    assert state["lmzoo"]["config"] == yaml.safe_load((gpt_run / "config.yaml").read_text())
    assert state["lmzoo"]["tokenizer"] == (gpt_run / "tokenizer.json").read_text()


def test_fit_returns_the_net_and_its_metrics(words, tmp_path):
    """The net is the checkpoint's, bit for bit; metrics are those of the last step, validated though 5 isn't due."""
    net, metrics = lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", "trainer.max_steps=5")))
    again = lmzoo.load(tmp_path / "run")
    ids = torch.randint(400, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net(ids), again(ids))
    assert not net.training and net.tokenizer.json == again.tokenizer.json and net.config == again.config
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == "5" and float(last["val/loss"]) == metrics["val/loss"]
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == metrics


def test_a_second_run_in_the_same_folder_is_refused(gpt_run, words):
    with pytest.raises(UserError, match="holds a run already"):
        lmzoo.fit(lmzoo.compose(*words(gpt_run, "model=gpt", "task=clm")))


def test_the_environment_is_left_as_it_was(gpt_run):
    assert "LMZOO_RANK_CONFIG" not in os.environ and "LOCAL_RANK" not in os.environ


def test_overfit_repeats_the_first_batch(words, tmp_path):
    """The loss of a batch seen 30 times is far below that of other text."""
    config = lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", "debug=overfit", "trainer.max_steps=30",
                                  "model.dropout=0", "optim.lr=1e-2"))  # fmt: skip
    lmzoo.fit(config)
    losses = [float(row["train/loss"]) for row in rows(tmp_path / "run")]
    assert losses[-1] < losses[0] - 2


@pytest.mark.parametrize("test_best", [True, False])
def test_the_test_is_of_the_best_in_validation(words, tmp_path, corpus, capsys, test_best):
    """At a learning rate at which it gets worse: net and metrics are those of the file; without the word the last's."""
    test = tmp_path / "test.txt"
    test.write_text(corpus.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    given = words(tmp_path / "run", "model=gpt", "task=clm", f"data.test_path={test}", "optim.lr=0.05",
                  "schedule=constant", "trainer.val_every_n_steps=1", f"checkpoint.test_best={test_best}")  # fmt: skip
    net, metrics = lmzoo.fit(lmzoo.compose(*given))
    losses = {int(row["step"]): float(row["val/loss"]) for row in rows(tmp_path / "run") if row["val/loss"]}
    best = min(losses, key=losses.get)
    assert best < 6
    (file,) = (tmp_path / "run" / "checkpoints").glob("best-*")
    assert file.name.startswith(f"best-{best:06d}-")
    wanted = lmzoo.load(file if test_best else tmp_path / "run").state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in net.state_dict().items())
    assert metrics["val/loss"] == pytest.approx(losses[best if test_best else 6], rel=1e-6)
    assert (f"the test is of the best by val/loss, {file.name}" in capsys.readouterr().out) == test_best
    assert metrics["test/loss"] > 0


NET_MISTAKES = [
    (("model.d_model=100", "model.n_heads=12"), "d_model=100 is not divisible by n_heads=12"),
    (("data.row_length=65",), "data.row_length=65 is more than the 64 positions of the model"),
    (("model.norm.epsilon=1",), "model.norm.epsilon: LayerNorm has no such word; did you mean eps?"),
    (("model.norm.eps=small",), "model.norm.eps='small' should be a number"),
    (("optim.optimizer.betas=[0.9,1.0]",), "optim.optimizer: Invalid beta parameter at index 1: 1.0"),
    (("optim.optimizer.betas=[0.9]",), "optim.optimizer.betas=[0.9] should be a list of 2 (each a number)"),
    (("optim.optimizer.betta=1",), "optim.optimizer.betta: AdamW has no such word; did you mean betas?"),
    (("trainer.precision=16-true", "trainer.accelerator=cpu"), "trainer.precision=16-true: a CPU trains in fp16 as"),
    (("optim.freeze=[emebd*]",), "optim.freeze: emebd* matches no parameter; there are embed*"),
    (("optim.no_decay=[emebd*]",), "optim.no_decay: emebd* matches no parameter; there are embed*"),
    (("optim.freeze=[*]",), "the model has no trainable parameter"),
    (("optim=muon", "optim.freeze=[blocks*]"), "optim=muon: no matrix of the blocks is trained"),
    (("optim=sgd", "optim.optimizer.momentum=0"), "optim.optimizer: Nesterov momentum requires a momentum"),
    (("optim.optimizer={_target_: torch.optim.SparseAdam}",), "optim.optimizer: SparseAdam does not support dense"),
    (("model.ffn.activation.approximate=abc",), "model: approximate argument must be either none or tanh"),
    (("trainer.devices=-1", "trainer.accelerator=cpu"), "trainer.devices=-1 means all GPUs, and there is none"),
    (("tokenizer=unigram",), "task=clm needs a bos token"),
    (("model=t5", "task=span_corruption", "data.packing=isolate"), "data.packing=isolate: spans of span corruption"),
    (("model=bert", "task=mlm", "tokenizer=bpe"), "task=mlm needs a mask token"),
]


@pytest.mark.parametrize(("more", "line"), NET_MISTAKES, ids=[" ".join(more) for more, _ in NET_MISTAKES])
def test_what_shows_on_the_net_is_found_before_data_is_read(words, tmp_path, more, line):
    """The data's file is there, and nobody reads that it is no text."""
    (tmp_path / "no.txt").write_bytes(b"\xff")
    config = lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", f"data.path={tmp_path / 'no.txt'}", *more))
    with pytest.raises(UserError) as refusal:
        lmzoo.fit(config)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


DATA_MISTAKES = [
    (("data.path=/nowhere/*.txt",), "matches no file"),
    (("data.batch_size=10", "data.micro_batch_size=4"), "data.batch_size=10 is not divisible by"),
    (("tokenizer.vocab_size=100",), "tokenizer.vocab_size=100"),
    (("task=classification", "data.packing=single"), "needs labels"),
]


@pytest.mark.parametrize(("more", "line"), DATA_MISTAKES, ids=[" ".join(more) for more, _ in DATA_MISTAKES])
def test_what_shows_on_the_data(words, tmp_path, more, line):
    config = lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", *more))
    with pytest.raises(UserError) as refusal:
        lmzoo.fit(config)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_auto_precision_is_a_word_of_lightning():
    assert parts.precision("auto", "cpu") in ("bf16-mixed", "32-true")
    assert parts.precision("64-true", "cpu") == "64-true"


def test_the_report():
    metrics = {"val/loss": 2.0, "val/bits_per_byte": 1.5, "test/loss": 3.0}
    assert parts.report(metrics, 2.25) == "val    loss 2  bits per byte 1.5 (xz: 2.25)\ntest   loss 3"
    sets = {"val/loss": 2.0, "val/code/loss": 1.0, "val/code/bits_per_byte": 1.5, "val/a/b/loss": 3.0}
    assert parts.report(sets, 2.25) == "val      loss 2\nval/code loss 1  bits per byte 1.5\nval/a/b  loss 3"
    assert parts.report({"test/loss": 2.0, "test/tokens": 12345}) == "test   loss 2  of 12,345 tokens"


@pytest.mark.slow
@pytest.mark.parametrize("more", ["data.micro_batch_size=2", "trainer.limit_val_batches=1"])
def test_two_ranks_are_the_run_of_one(words, tmp_path, more):
    """BEHAVIOUR 4, with dropout: the same losses to 1e-6, one folder, and nothing said twice.

    Under `limit_val_batches` one rank validates forwards of 4 rows and two of 2: all in all the same 4.
    """
    dropout = "model.dropout=0" if "limit" in more else "model.dropout=0.1"  # it follows the micro-batch
    given = ("model=gpt", "task=clm", more, dropout, "trainer.accelerator=cpu")
    one = command(*words(tmp_path / "one", *given))
    two = command(*words(tmp_path / "two", *given, "trainer=ddp"))
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("run folder") == 1 and two.stdout.count("Beginnings") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for column in ("train/loss", "val/loss", "grad_norm"):
            assert a[column] == b[column] == "" or float(a[column]) == pytest.approx(float(b[column]), abs=1e-6), column
        assert a["tokens"] == b["tokens"]
    (weights, others) = (lmzoo.load(tmp_path / name).state_dict() for name in ("one", "two"))
    assert list(weights) == list(others)
    assert all(torch.allclose(value, others[key], atol=1e-5) for key, value in weights.items())


@pytest.mark.slow
def test_a_spread_run_is_the_run_of_one(words, tmp_path, corpus):
    """trainer=fsdp, to folders of shares, with recomputed blocks; its checkpoint goes on and is measured on one."""
    test = tmp_path / "test.txt"
    test.write_bytes(corpus.read_bytes())  # a file of its own: what is trained on is refused
    given = ("model=gpt", "task=clm", "data.micro_batch_size=1", "trainer.accelerator=cpu", f"data.test_path={test}")
    fsdp = ("trainer=fsdp", "checkpoint.sharded=true", "trainer.activation_checkpointing=full")
    one = command(*words(tmp_path / "one", *given))
    two = command(*words(tmp_path / "two", *given, *fsdp))
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        for column in ("train/loss", "val/loss", "test/loss", "grad_norm"):
            assert a[column] == b[column] == "" or float(a[column]) == pytest.approx(float(b[column]), abs=2e-6), column
    assert (tmp_path / "two" / "checkpoints" / "last.ckpt").is_dir()
    (weights, others) = (lmzoo.load(tmp_path / name).state_dict() for name in ("one", "two"))
    assert list(weights) == list(others)
    assert all(torch.allclose(value, others[key], atol=1e-5) for key, value in weights.items())
    config = lmzoo.compose(f"ckpt={tmp_path / 'two'}", "trainer.strategy=auto", "trainer.devices=1",
                           "trainer.max_steps=7")  # fmt: skip
    lmzoo.fit(config)
    assert [row["step"] for row in rows(tmp_path / "two") if row["train/loss"]][-1] == "7"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_compiled_blocks_on_two_ranks(words, tmp_path, engine):
    """The losses of one process that is not compiled, without dropout, whose random numbers differ."""
    given = ("model=gpt", "task=clm", "model.dropout=0", "data.micro_batch_size=2", "trainer.accelerator=cpu",
             "trainer.max_steps=3")  # fmt: skip
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "one", *given)))
    two = command(*words(tmp_path / "two", *given, f"trainer={engine}", "compile=true"))
    assert two.returncode == 0, two.stderr
    for a, b in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert float(a["train/loss"]) == pytest.approx(float(b["train/loss"]), abs=1e-5)


@pytest.mark.slow
def test_a_sweep_of_two_jobs_under_two_ranks(words, tmp_path, monkeypatch):
    """BEHAVIOUR 34: two folders, two wandb runs with ids of their own, the third job's mistake its own."""
    monkeypatch.chdir(tmp_path)
    given = words("sweep", "task=clm", "trainer=ddp", "trainer.max_steps=2", "logger.wandb.mode=offline")
    done = command("-m", *given, "model=gpt,llama,bert")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("lmzoo:")] != []
    folders = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == ["0-gpt", "1-llama"]
    shown = done.stdout[done.stdout.index("job  words"):].splitlines()
    assert shown[-1].endswith("python -m lmzoo.tools.summarise_sweep sweep")
    assert [line.split()[:2] for line in shown[1:-1]] == [["0", "model=gpt"], ["1", "model=llama"], ["2", "model=bert"]]
    ids = set()
    for folder in folders:
        assert len(rows(folder)) == 2
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["run_dir"] == str(folder.relative_to(tmp_path))
        ids |= {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")}
    assert len(ids) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), [("bert", "mlm"), ("t5", "span_corruption"), ("llama", "clm")])
def test_every_family_trains_and_is_fine_tuned(words, tmp_path, model, task):
    given = words(tmp_path / "run", f"model={model}", f"task={task}", "tokenizer.vocab_size=600")
    _, metrics = lmzoo.fit(lmzoo.compose(*given))
    assert 0 < metrics["val/loss"] < 8
    labelled = tmp_path / "labelled.csv"
    labelled.write_text("text,label\n" + "".join(f"the {animal} sat {i} times,{animal}\n" for i in range(40)
                                                 for animal in ("cat", "dog")), encoding="utf-8")  # fmt: skip
    given = ["task=classification", f"init_from={tmp_path / 'run'}", "data=csv", f"data.path={labelled}",
             f"run_dir={tmp_path / 'tuned'}", "data.batch_size=8", "trainer.max_steps=2", "trainer.precision=32-true",
             "logger.wandb.mode=disabled"]  # fmt: skip
    tuned, metrics = lmzoo.fit(lmzoo.compose(*given))
    assert 0 <= metrics["val/accuracy"] <= 1
    assert plain(tuned.config)["head"]["n_classes"] == 2
    assert lmzoo.load(tmp_path / "tuned").config == tuned.config


@pytest.mark.parametrize(("more", "line"), [
    (("data.path=/nowhere/*.txt",), "data.path=/nowhere/*.txt matches no file"),
    (("data.row_length=65",), "data.row_length=65 is more than the 64 positions"),
    (("task=classification", "data.packing=single"), "this task needs labels, and the data has none"),
    (("task=classification", "data.packing=single", "data=csv", "data.path=one.csv"), "every text has the label 'x'")])
def test_a_mistake_found_on_the_way_is_one_line_of_the_command(words, tmp_path, monkeypatch, capfd, more, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.csv").write_text("text,label\n" + "".join(f"text {i},x\n" for i in range(90)))
    refused(words(tmp_path / "run", "model=gpt", "task=clm", *more), line, monkeypatch, capfd)


def test_a_corpus_that_has_changed_is_one_line_of_the_command(words, tmp_path, corpus, monkeypatch, capfd):
    (tmp_path / "own.txt").write_text(corpus.read_text())
    lmzoo.fit(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", f"data.path={tmp_path}/own.txt")))
    (tmp_path / "own.txt").write_text(corpus.read_text() + "\n\none more")
    refused([f"ckpt={tmp_path}/run", "trainer.max_steps=9"], "its data has changed since", monkeypatch, capfd)


def refused(words, line, monkeypatch, capfd):
    """The command ends with code 2, and all that it says of the matter is one line."""
    monkeypatch.setattr("sys.argv", ["lmzoo.train", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main()
    said = capfd.readouterr()
    assert end.value.code == 2 and "Traceback" not in said.out + said.err
    mistakes = [one for one in said.err.splitlines() if one.startswith("lmzoo: ")]
    assert len(mistakes) == 1 and line in mistakes[0]


def test_a_run_without_validation(words, tmp_path):
    """It has no metric to be best by, and none to report."""
    _, metrics = lmzoo.fit(lmzoo.compose(*words(tmp_path, "model=gpt", "task=clm", "data.val_fraction=0")))
    assert metrics == {} and (tmp_path / "checkpoints" / "step-000006.ckpt").exists()
