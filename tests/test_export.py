"""A run becomes a folder that transformers opens, and comes back."""

import json
import os
import shutil
import sys

import pytest
import torch
from lmzoo.tools.export import export

import lmzoo
import lmzoo.checkpoint
import models
from lmzoo import hf, programs
from lmzoo.tokenizer import byte

transformers = pytest.importorskip("transformers")


CLASSIFIER = {"_target_": "lmzoo.blocks.head.Classifier", "_partial_": True, "n_classes": 3, "pool": "first"}
CARD = """\
---
library_name: transformers
pipeline_tag: text-classification
---

# mine

|  |  |
|---|---|
| architecture | BertForSequenceClassification, encoder |
| parameters | PARAMETERS |
| sizes | layers 2, d_model 16, vocabulary 400, longest row 32 |
| task | classification |
| began as | `runs/a` |
| data | `a\\|b.csv`, `c.csv` |
| labels | bad, fair, good |
| weights | `last.ckpt`, after 1,200 steps and 34,567 tokens |
| seed | 3 |
| made by | lmzoo 0.1 |

## Results

Of the run's best weights by val/loss:

| metric | value |
|---|---|
| test/f1 | 0.5 |
| val/loss | 1.235 |

![loss](loss.png)

## Training

```
python -m lmzoo.train 'data.path=[a|b.csv,c.csv]'
python -m lmzoo.train ckpt=runs/x
```

## Use

```python
from transformers import AutoTokenizer, BertForSequenceClassification
tokenizer, model = (kind.from_pretrained('FOLDER') for kind in (AutoTokenizer, BertForSequenceClassification))
print(model(**tokenizer('Some text', return_tensors='pt')).logits)
```
"""


@pytest.fixture
def classifier_run(tmp_path):
    """(a run's folder as its files would be, its net)."""
    net, run = models.make("bert", vocab_size=400, head=CLASSIFIER), tmp_path / "run"
    net.tokenizer = byte([], 400)
    config = {
        "name": "mine", "seed": 3, "init_from": "runs/a", "model": models.config("bert", 400, head=CLASSIFIER),
        "task": {"_target_": "lmzoo.tasks.classification.Classification", "labels": "class"},
        "data": {"path": ["a|b.csv", "c.csv"], "name": None, "sources": {}, "reader": {"_target_": "x"}},
        "checkpoint": {"monitor": "val/loss", "test_best": True},
    }  # fmt: skip
    identity = {"config": config, "tokenizer": net.tokenizer.json, "labels": ["bad", "fair", "good"], "version": "0.1"}
    state = {"state_dict": {f"net.{name}": weight for name, weight in net.state_dict().items()}, "lmzoo": identity,
             "global_step": 1200, "callbacks": {"Metrics": {"tokens": 34567}, "Other": {}}}  # fmt: skip
    (run / "checkpoints").mkdir(parents=True)
    lmzoo.checkpoint.write(state, run / "checkpoints" / "last.ckpt")
    (run / "result.json").write_text('{"test/f1": 0.5, "val/loss": 1.23456}')
    commands = ["/usr/bin/python -m lmzoo.train 'data.path=[a|b.csv,c.csv]'", "python -m lmzoo.train ckpt=runs/x"]
    (run / "environment.jsonl").write_text("".join(json.dumps({"command": one}) + "\n" for one in commands))
    (run / "loss.png").write_bytes(b"a picture")
    return run, net


def test_a_card_says_what_the_runs_files_say(classifier_run, tmp_path):
    run, net = classifier_run
    out = tmp_path / "out"
    assert export(str(run / "checkpoints" / "last.ckpt"), str(out)).startswith(f"{out}: open it by")
    n = sum(parameter.numel() for parameter in net.parameters())
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card == CARD.replace("PARAMETERS", f"{n:,}").replace("FOLDER", str(out))
    assert (out / "loss.png").read_bytes() == b"a picture"


def test_nothing_is_left_of_an_export_that_fails(classifier_run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(OSError, match="No space"):
            export(str(classifier_run[0]), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export(str(classifier_run[0]), str(tmp_path / "out"))


def test_an_export_leaves_alone_what_another_has_written_or_writes(classifier_run, tmp_path, monkeypatch):
    from lmzoo.tools import export as tool

    run, out, usual = str(classifier_run[0]), tmp_path / "out", tool.load
    first = []

    def load(*given):
        if not first:
            first.append(True)
            export(run, str(out))  # while this one reads its checkpoint
        return usual(*given)

    with monkeypatch.context() as patch:
        patch.setattr(tool, "load", load)
        with pytest.raises(lmzoo.UserError, match="out is not empty"):
            export(run, str(out))
    names = {"README.md", "config.json", "loss.png", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in out.iterdir()} == names
    assert transformers.AutoModelForSequenceClassification.from_pretrained(out).num_labels == 3
    with tool.filling(tmp_path / "other"), pytest.raises(lmzoo.UserError, match="another export is writing to it"):
        with tool.filling(tmp_path / "other"):
            pass


def test_a_part_of_ones_own_is_exported_where_it_is_trusted(tmp_path, monkeypatch):
    own = "from lmzoo.blocks.ffn import FeedForward\nclass Mine(FeedForward): pass\n"
    (tmp_path / "part_of_ones_own.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    config = models.config("gpt", 400)
    config["ffn"] |= {"_target_": "part_of_ones_own.Mine"}
    net = lmzoo.build(config, trust=("part_of_ones_own",)).eval()
    identity = {"config": {"model": config, "task": {}, "data": {}}, "tokenizer": byte([], 400).json}
    weights = {f"net.{name}": weight for name, weight in net.state_dict().items()}
    state = {"state_dict": weights, "lmzoo": identity, "global_step": 1}
    lmzoo.checkpoint.write(state, tmp_path / "a.ckpt", listed=False)
    with pytest.raises(lmzoo.UserError, match="part_of_ones_own"):
        export(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "torch_export")
    export(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "torch_export", trust=("part_of_ones_own",))
    rows = {"input_ids": models.ids(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    found = programs.opened(tmp_path / "out" / "model.pt2")(rows)
    torch.testing.assert_close(found, net(rows["input_ids"]), atol=1e-5, rtol=0)


def test_what_the_card_proposes_runs_and_a_pipeline_names_the_labels(classifier_run, tmp_path, capsys):
    run, net = classifier_run
    export(str(run / "checkpoints" / "last.ckpt"), str(tmp_path / "out"))
    example = (tmp_path / "out" / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0]
    made = {}
    exec(example, made)
    row = torch.tensor([net.tokenizer.document(net.tokenizer.encode("Some text"))])
    logits = made["model"](**made["tokenizer"]("Some text", return_tensors="pt")).logits
    torch.testing.assert_close(logits, net(row), atol=1e-5, rtol=0)
    assert str(logits) in capsys.readouterr().out
    pipeline = transformers.pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    expected = net(row).softmax(-1)
    [found] = pipeline(["Some text"])
    assert found["label"] == ["bad", "fair", "good"][expected.argmax()]
    assert found["score"] == pytest.approx(expected.max().item(), abs=1e-5)


def example(folder):
    """What the Python in a folder's card leaves behind."""
    made = {}
    exec((folder / "README.md").read_text(encoding="utf-8").split("```python\n")[1].partition("```")[0], made)
    return made


@pytest.mark.parametrize("to", ["torch_export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_what_the_card_of_a_program_proposes_runs(classifier_run, tmp_path, capsys, to):
    if to == "onnx":
        pytest.importorskip("onnxscript"), pytest.importorskip("onnxruntime")
    run, net = classifier_run
    told = export(str(run / "checkpoints" / "last.ckpt"), str(tmp_path / "out"), to)
    file, name = run / "checkpoints" / "last.ckpt", {"torch_export": "model.pt2", "onnx": "model.onnx"}[to]
    assert f"it is of {file}, step 1,200\nlogits differ from the net's by at most " in told
    assert float(told.split()[-1]) < 1e-5 and (tmp_path / "out" / name).is_file()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "out" / "labels.json").read_text(encoding="utf-8")) == ["bad", "fair", "good"]
    assert "| labels | bad, fair, good |" in card and "encoder of Embed, Learned, Attention" in card
    made = example(tmp_path / "out")
    row = torch.tensor([net.tokenizer.document(net.tokenizer.encode("Some text"))])
    assert made["ids"].tolist() == row.tolist()
    given = {"input_ids": row, "attention_mask": torch.ones_like(row), "token_type_ids": torch.zeros_like(row)}
    expected = net(row)
    found = (made["model"](**given) if to == "torch_export" else
             torch.tensor(made["model"].run(None, {name: ids.numpy() for name, ids in given.items()})[0]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert str(expected[0, 0].item())[:6] in capsys.readouterr().out
    for given in tmp_path / "out", tmp_path / "out" / name:
        with pytest.raises(lmzoo.UserError, match=f"{name} is an exported program, .* give the run that"):
            lmzoo.load(given)


@pytest.mark.slow
def test_a_program_without_a_run_has_no_card(gpt_run, tmp_path):
    export(str(gpt_run), str(tmp_path / "hf"))
    told = export(str(tmp_path / "hf"), str(tmp_path / "out"), "torch_export")
    assert f"it is of {tmp_path / 'hf'}\n" in told
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "model.pt2", "tokenizer.json", "tokenizer_config.json"}  # fmt: skip


@pytest.mark.slow
def test_eight_bits_and_what_they_cost(gpt_run, tmp_path):
    """The fp32 program has the bits per byte that the run ended with."""
    pytest.importorskip("onnxscript"), pytest.importorskip("onnxruntime")
    told = export(str(gpt_run), str(tmp_path / "out"), "onnx_int8")
    cost = json.loads((tmp_path / "out" / "int8.json").read_text())
    ended = json.loads((gpt_run / "result.json").read_text())["val/bits_per_byte"]
    assert cost["unit"] == "bits per byte" and cost["fp32"] == pytest.approx(ended, abs=1e-4)
    assert 1e-7 < abs(cost["int8"] - ended) < 0.1 and cost["size"] < 0.7 and cost["speed"] > 0
    line = f"validation bits per byte {cost['fp32']:.4f} -> {cost['int8']:.4f} ("
    assert line in told and line in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    net, run = lmzoo.load(gpt_run), programs.opened(tmp_path / "out" / "model.onnx")
    rows = programs.example(net, 2, 9)
    torch.testing.assert_close(run(rows), net(**rows), atol=0.1, rtol=0)


@pytest.mark.slow
def test_eight_bits_without_a_run(gpt_run, tmp_path):
    pytest.importorskip("onnxscript"), pytest.importorskip("onnxruntime")
    export(str(gpt_run), str(tmp_path / "hf"))
    told = export(str(tmp_path / "hf"), str(tmp_path / "out"), "onnx_int8")
    assert "validation loss not measured: a folder of transformers has no validation split" in told


def test_the_newest_checkpoint_or_the_best_or_the_one_that_is_named(gpt_run, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(gpt_run / "checkpoints", folder)
    for name in ("best-000002-2.5.ckpt", "best-000004-1.5.ckpt", "best-000006-10.5.ckpt", "last.ckpt"):
        lmzoo.checkpoint.link(next(folder.glob("step-*.ckpt")), name)
    for number, (run, best, taken) in enumerate([(tmp_path / "run", False, "last.ckpt"),
                                                 (tmp_path / "run", True, "best-000004-1.5.ckpt"),
                                                 (folder / "best-000002-2.5.ckpt", False, "best-000002-2.5.ckpt")]):
        told = export(str(run), str(tmp_path / str(number)), best=best)
        assert told.endswith(f"it is of {folder / taken}, step 6")
        assert f"`{taken}`, after 6" in (tmp_path / str(number) / "README.md").read_text(encoding="utf-8")
    for run in (folder / "last.ckpt", tmp_path / "0"):
        with pytest.raises(lmzoo.UserError, match="^--best: "):
            export(str(run), str(tmp_path / "new"), best=True)
    assert not (tmp_path / "new").exists()


def test_a_run_of_which_little_is_left(gpt_run, tmp_path):
    """Nothing is said in the place of what is missing."""
    shutil.copytree(gpt_run / "checkpoints", tmp_path / "run" / "checkpoints")
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "## Results" not in card and "loss.png" not in card and "## Training" not in card
    assert "| weights | `last.ckpt`, after 6 steps and 1,5" in card and not (tmp_path / "out" / "loss.png").exists()
    export(str(tmp_path / "out"), str(tmp_path / "again"))  # a folder of transformers is no run
    assert not (tmp_path / "again" / "README.md").exists()


def test_export_and_back(gpt_run, tmp_path):
    export(str(gpt_run), str(tmp_path / "hf"))
    ours, back = lmzoo.load(gpt_run), lmzoo.load(tmp_path / "hf")
    ids = torch.tensor([ours.tokenizer.encode("the cat sat on a mat")])
    assert torch.allclose(ours(ids), back(ids), atol=1e-5)
    assert back.tokenizer.encode("the dog ran") == ours.tokenizer.encode("the dog ran")


def test_a_folder_that_is_not_named_is_called_after_the_run_and_the_format(gpt_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export(str(gpt_run), None).startswith(f"{gpt_run.name}-hf: open it")
    assert hf.is_hf_folder(f"{gpt_run.name}-hf") and len([*tmp_path.iterdir()]) == 1
    with pytest.raises(lmzoo.UserError, match="-hf is not empty: give a new folder"):
        export(str(gpt_run), None)


@pytest.mark.parametrize(("place", "reason"), [
    ("full", "full is not empty: give a new folder"), ("file", "file is a file; give a new folder"),
    ("file/x", "file is a file; give a new folder"), ("file/x/y", "file is a file; give a new folder"),
])  # fmt: skip
def test_where_no_folder_can_be_made(tmp_path, place, reason):
    """Said before the run is looked for; by `to_hf` too."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").write_text("mine")
    for write in (lambda folder: export("/nowhere", folder), lambda folder: lmzoo.hf.to_hf(models.make("gpt"), folder)):
        with pytest.raises(lmzoo.UserError) as refusal:
            write(str(tmp_path / place))
        assert str(refusal.value).endswith(reason)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    with pytest.raises(lmzoo.UserError, match="nothing can be written to"):
        lmzoo.hf.to_hf(models.make("gpt"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_without_transformers_that_is_all_that_is_said(gpt_run, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: lmzoo.hf.to_hf(models.make("gpt"), tmp_path / "new"), lambda: lmzoo.hf.from_hf(tmp_path),
                 lambda: export(str(gpt_run), tmp_path / "new")):
        with pytest.raises(lmzoo.UserError) as refusal:
            call()
        assert str(refusal.value) == "Hugging Face's formats need transformers: pip install 'lmzoo[hf]'"
    assert not (tmp_path / "new").exists()
