"""What is written for transformers: who may read it, what is said of it, and BERT under the heads of our tasks."""

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from lmzoo.tools.export import export

import lmzoo
import models
import tiny_run
from lmzoo import hf
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte

transformers = pytest.importorskip("transformers")

V = 53
LABELLING = {"classifier": "BertForSequenceClassification", "tagger": "BertForTokenClassification"}


def net_head(kind, **words):
    pool = {"pool": "first"} if kind == "Classifier" else {}
    return {"_target_": f"lmzoo.blocks.head.{kind}", "_partial_": True, "n_classes": 5, "dropout": 0.2, **pool} | words


def labelling(name, **words):
    """Our BERT under the head of a task on labelled data, of five classes."""
    return models.make("bert", vocab_size=V, head=net_head(name.capitalize(), **words))


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_a_folder_is_readable_by_all_alike_and_nothing_is_said_of_it(name, tmp_path, capfd):
    hf.to_hf(models.make(name), tmp_path / "out")
    hf.from_hf(tmp_path / "out")
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5_v1_0", "t5", *LABELLING])
def test_transformers_warns_of_nothing(name, tmp_path, caplog):
    """But transformers 5 calls a T5 tied whatever its config.json says, and warns where one isn't, as google's v1.1."""
    hf.to_hf(labelling(name) if name in LABELLING else models.make(name), tmp_path)
    cls = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    told = logging.getLogger("transformers")
    told.addHandler(caplog.handler)  # it does not hand its records on
    try:
        theirs = cls.from_pretrained(tmp_path)
    finally:
        told.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records]
    if name == "t5" and theirs.config.tie_word_embeddings:
        assert said and not torch.equal(theirs.lm_head.weight, theirs.shared.weight)
        said = [line for line in said if "so we will NOT tie them" not in line]
    assert not said


@pytest.mark.parametrize("name", LABELLING)
def test_a_net_of_a_task_on_labelled_data_has_the_same_logits(name, tmp_path):
    ours = labelling(name)
    hf.to_hf(ours, tmp_path / "out", {"id2label": {str(i): f"label {i}" for i in range(5)}})
    theirs, report = getattr(transformers, LABELLING[name]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()) and theirs.config.id2label[3] == "label 3" and theirs.config.num_labels == 5
    assert theirs.dropout.p == 0.2
    for side in "none", "right":
        ids, mask = models.ids(3, 11, vocab_size=V), torch.ones(3, 11, dtype=torch.long)
        mask[1, 4:], mask[2, 10:] = (0, 0) if side == "right" else (1, 1)
        types = ids % 2
        expected, got = theirs(ids, attention_mask=mask, token_type_ids=types).logits, ours(ids, mask, None, types)
        kept = ... if name == "classifier" else mask.bool()
        assert expected.shape[-1] == 5 and expected.std() > 0.1
        torch.testing.assert_close(got[kept], expected[kept], atol=1e-5, rtol=0)
    for source in theirs, tmp_path / "out":
        back = hf.from_hf(source)
        assert back.config["head"] == ours.config["head"] and back.config["n_layers"] == 2
        torch.testing.assert_close(back(ids, mask, None, types), got, atol=1e-6, rtol=0)


def test_a_classifier_that_lmzoo_cannot_export_is_refused_by_what_differs(tmp_path):
    other, decoder = labelling("classifier", pool="mean"), models.make("gpt", head=net_head("Classifier"))
    for net, line in ((other, "BertForSequenceClassification, differs: head.pool is mean"),
                      (decoder, "GPT2LMHeadModel, differs: head is Classifier")):  # fmt: skip
        with pytest.raises(UserError, match=f"knows no architecture .* the nearest, {line}"):
            hf.to_hf(net, tmp_path / "out")


@pytest.mark.parametrize("command, words", [
    ("generate", ["ckpt=hf", "prompt=a"]), ("train", ["init_from=hf", "task=clm", "run_dir=run"]),
    ("evaluate", ["ckpt=hf", "measure=sliding_window", "data=text", "data.path=a.txt"]),
    ("tools.prepare_data", ["init_from=hf", "task=clm"]), ("tools.inspect_data", ["init_from=hf", "task=clm"]),
    ("tools.attention", ["hf", "--text", "a"]),
])  # fmt: skip
def test_what_reads_text_refuses_a_folder_without_a_tokenizer(tmp_path, monkeypatch, capsys, command, words):
    monkeypatch.chdir(tmp_path)
    hf.to_hf(models.make("gpt"), "hf")
    Path("a.txt").write_text("a text")
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"lmzoo.{command}").main()
    assert capsys.readouterr() == ("", "lmzoo: hf holds no tokenizer to read a text with: save the net's into it\n")
    assert {file.name for file in tmp_path.iterdir()} == {"hf", "a.txt"}


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        hf.to_hf(models.make("gpt"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


WIDE = {"d_model": 24, "d_kv": 8, "num_heads": 3, "num_layers": 2, "d_ff": 40}
NARROW = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
FOREIGN = {  # how transformers itself makes it, and what it was made for
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 32}, "clm"),
    "LlamaForCausalLM": ("LlamaConfig", NARROW | {"num_key_value_heads": 1, "max_position_embeddings": 32}, "clm"),
    "BertForMaskedLM": ("BertConfig", NARROW | {"max_position_embeddings": 32}, "mlm"),
    "T5ForConditionalGeneration": ("T5Config", WIDE, "span_corruption"),
    "T5ForConditionalGeneration v1.1": ("T5Config", WIDE | {"feed_forward_proj": "gated-gelu"}, "span_corruption"),
}


@pytest.mark.parametrize("name", [name if "Bert" in name else pytest.param(name, marks=pytest.mark.slow)
                                  for name in FOREIGN])
def test_a_run_starts_from_a_folder_of_transformers_and_goes_back(name, tmp_path):
    """By a step of rate 0: with its weights and its tokenizer, to a net of theirs with its logits."""
    config, sizes, task = FOREIGN[name]
    folder, run, cls = tmp_path / "theirs", tmp_path / "run", getattr(transformers, name.split()[0])
    own = byte([], 400)
    roles = {f"{role}_token": own.token(getattr(own, role)) for role in ("bos", "eos", "pad", "unk", "mask")}
    ids = {f"{role}_token_id": getattr(own, role) for role in ("bos", "eos", "pad")}
    theirs = cls(getattr(transformers, config)(vocab_size=400, **sizes, **ids)).eval()
    theirs.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(own.json), **roles).save_pretrained(folder)  # fmt: skip
    words = tiny_run.spoken(tiny_run.texts(tmp_path), f"task={task}", "data=text", f"init_from={folder}",
                            f"run_dir={run}", "optim.lr=0", "trainer.max_steps=1", "data.row_length=24")  # fmt: skip
    with tiny_run.lean():
        lmzoo.fit(lmzoo.compose(*(word for word in words if not word.startswith(("model.", "size=", "tokenizer=")))))
    export(str(run), str(tmp_path / "back"))
    rows = {"input_ids": models.ids(2, 11, vocab_size=400), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    rows |= {"decoder_input_ids": models.ids(2, 5, vocab_size=400)} if task == "span_corruption" else {}
    expected = theirs(**rows).logits
    assert expected.std() > 0.01
    for net in lmzoo.load(folder), lmzoo.load(run):
        torch.testing.assert_close(net(**rows), expected, atol=1e-5, rtol=0)
        assert net.tokenizer.encode("Some text") == own.encode("Some text")
    torch.testing.assert_close(cls.from_pretrained(tmp_path / "back")(**rows).logits, expected, atol=1e-5, rtol=0)
