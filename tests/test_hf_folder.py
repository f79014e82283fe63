"""What is written for transformers: who may read it, what is said of it, and BERT under the heads of our tasks."""

import json
import logging

import pytest
import torch

import models
from lmzoo import hf
from lmzoo.errors import UserError

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


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        hf.to_hf(models.make("gpt"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
