"""Causal language modelling: what is a target and what is not, on paper; then a net that learns one batch."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmzoo.tasks.clm import CausalLM, Shift
from torch.nn import functional as F

import models
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_unigram

TOKENIZER = byte([], 400, sentinels=0)
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "optimizer": partial(torch.optim.AdamW)}


def task(name="gpt", **settings):
    net = models.make(name, vocab_size=len(TOKENIZER), max_len=128)
    return CausalLM(net, TOKENIZER, OPTIM, lambda step, total: 1.0, **settings)


def documents(*texts):
    """A row of whole documents."""
    ids = [TOKENIZER.document(TOKENIZER.encode(text)) for text in texts]
    return example(sum(ids, []), np.repeat(np.arange(len(ids)), list(map(len, ids))))


def example(tokens, document_ids=None):
    documents = np.zeros(len(tokens)) if document_ids is None else document_ids
    return {"tokens": np.array(tokens, dtype=np.int64), "document_ids": np.array(documents, np.int32), "key": (0, 0, 0)}


# bos is 1, eos 2, pad 0 and the text's tokens are 11, 12, ...
def test_one_document_by_hand():
    batch = Shift(pad=0, isolate=False)([example([1, 11, 12, 2])])
    assert batch["input_ids"].tolist() == [[1, 11, 12]]
    assert batch["labels"].tolist() == [[11, 12, 2]]
    assert batch.keys() == {"input_ids", "labels"}  # nothing is padded, nothing to keep apart


@pytest.mark.parametrize("isolate", [False, True])
def test_two_documents_by_hand(isolate):
    batch = Shift(pad=0, isolate=isolate)([example([1, 11, 2, 1, 12, 2], [0, 0, 0, 1, 1, 1])])
    assert batch["input_ids"].tolist() == [[1, 11, 2, 1, 12]]
    assert batch["labels"].tolist() == [[11, 2, -100, 12, 2]]
    assert ("document_ids" in batch) is isolate
    if isolate:
        assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]]


def test_whole_documents_by_hand():
    """`fit`: an eos is a target, never an input; a cut document's last token is an input of its next row."""
    rows = [example([1, 11, 2, 1, 12, 2, 13, 14], [0, 0, 0, 1, 1, 1, 2, 2]), example([1, 15, 2])]
    batch = Shift(pad=0, isolate=True, fit=True)(rows)
    assert batch["input_ids"].tolist() == [[1, 11, 1, 12, 13], [1, 15, 0, 0, 0]]
    assert batch["labels"].tolist() == [[11, 2, 12, 2, 14], [15, 2, -100, -100, -100]]
    assert batch["document_ids"].tolist() == [[0, 0, 1, 1, 2], [0, 0, -1, -1, -1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_bos_eos_and_pad_are_one_token():
    """gpt: all three are 0. An eos is learned, what follows it and padding aren't; a bos predicts the first token."""
    rows = [example([0, 11, 0, 0, 12, 13], [0, 0, 0, 1, 1, 1]), example([14, 0])]
    batch = Shift(pad=0, isolate=False)(rows)
    assert batch["input_ids"].tolist() == [[0, 11, 0, 0, 12], [14, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[11, 0, -100, 12, 13], [0, -100, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]


def test_empty_document_predicts_its_eos():
    batch = Shift(pad=0, isolate=False)([example([1, 2, 1, 2], [0, 0, 1, 1])])
    assert batch["labels"].tolist() == [[2, -100, 2]]


def test_a_row_of_one_token_has_no_target():
    batch = Shift(pad=7, isolate=True)([example([1])])
    assert batch["input_ids"].tolist() == [[7]]
    assert batch["labels"].tolist() == [[-100]]
    assert batch["attention_mask"].tolist() == [[0]]


@pytest.mark.parametrize("row_length", [1, 2, 3, 5, 8, 100])
def test_each_token_is_a_target_once_over_all_cuts(row_length):
    """Documents of 0 to 6 tokens in a stream: t1 .. tn and eos of each once, whatever the cuts; bos never."""
    shift, stream, documents, expected = Shift(pad=0, isolate=False), [], [], []
    for number, length in enumerate([3, 0, 6, 1, 4]):
        text = [100 + 10 * number + i for i in range(length)] + [2]  # eos is 2
        stream += [1, *text]  # bos is 1
        documents += [number] * (length + 2)
        expected += text
    length, stride = shift.window(row_length)
    found = []
    for begin in range(0, len(stream), stride):
        row = shift([example(stream[begin : begin + length], documents[begin : begin + length])])
        assert row["input_ids"].shape[1] <= row_length
        for token, label in zip(row["input_ids"][0].tolist(), row["labels"][0].tolist(), strict=True):
            found += [label] if label != -100 else []
            assert token != 2 or label == -100  # what follows an eos is never predicted
    assert found == expected


def test_batch_size_changes_nothing():
    rows = [example([1, 11, 12, 2]), example([1, 13, 2]), example([1, 14, 15, 16, 2])]
    together = Shift(pad=0, isolate=False)(rows)
    for i, row in enumerate(rows):
        alone = Shift(pad=0, isolate=False)([row])
        n = alone["labels"].shape[1]
        assert torch.equal(together["labels"][i, :n], alone["labels"][0])
        assert (together["labels"][i, n:] == -100).all()


def test_loss_is_torchs_on_the_shifted_tokens():
    """Shifted here by hand, over one document: everything after bos is a target."""
    model, row = task().eval(), documents("import this")
    tokens = torch.from_numpy(row["tokens"])[None]
    logits = model.net(tokens)[0]
    sums = model.loss(model.collator([row]))
    torch.testing.assert_close(sums["loss"], F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum"))
    with torch.no_grad():
        assert model.loss(model.collator([row]))["correct"] == (logits[:-1].argmax(-1) == tokens[0, 1:]).sum()
    assert sums["targets"] == len("import this") + 1


@pytest.mark.parametrize("packing", ["isolate", "fit"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_isolated_documents_cost_what_they_cost_alone(name, packing):
    texts, model = ["import this", "x", "def f(): return 1"], task(name, packing=packing).eval()
    with torch.no_grad():
        packed = model.loss(model.collator([documents(*texts)]))
        alone = [model.loss(model.collator([documents(text)])) for text in texts]
    for key in ("loss", "nll", "correct", "targets"):
        torch.testing.assert_close(packed[key], sum(sums[key] for sums in alone))
    streamed = task(name, packing="stream").eval()
    assert abs(streamed.loss(streamed.collator([documents(*texts)]))["nll"] - packed["nll"]) > 1e-3


def test_padding_changes_no_loss():
    model, rows = task().eval(), [documents("import this"), documents("x")]
    together = model.loss(model.collator(rows))
    alone = [model.loss(model.collator([row])) for row in rows]
    torch.testing.assert_close(together["loss"], alone[0]["loss"] + alone[1]["loss"])


def test_one_repeated_batch_is_learned_and_shown():
    """Then the prompt that begins the text is continued with the rest of it."""
    model = task(prompts=["import"]).train()
    batch = model.collator([documents("import this")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        sums = model.loss(batch)
        (sums["loss"] / sums["targets"]).backward()
        optimizer.step()
    assert sums["loss"] / sums["targets"] < 0.02
    assert model.show().splitlines()[1:] == ["  [import] this"]
    assert model.net.training


def test_bits_per_byte_by_hand():
    """8 ln 2 nats for 2 bytes are 4 bits a byte, unless only a part of the split was run."""
    model = task()
    rows, read = {"val": 3, "test": 3}, {"val": 3, "test": 2}
    data = SimpleNamespace(n_bytes={"val": 2, "test": 4}.get, n_rows=rows.get, n_evaluated=read.get)
    model.__dict__["_trainer"] = SimpleNamespace(datamodule=data)
    sums = {"nll": 8 * math.log(2), "correct": 1.0, "targets": 4.0}
    assert model.summarise(sums, "val")["bits_per_byte"] == pytest.approx(4)
    assert model.summarise(sums, "val")["perplexity"] == pytest.approx(4)
    assert "bits_per_byte" not in model.summarise(sums, "test")


class Held:
    """A validation split in memory: `span` and `read`, as of the token store."""

    def __init__(self, texts):
        rows = [TOKENIZER.document(TOKENIZER.encode(text)) for text in texts]
        self.tokens, self.ends = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        self.n_documents, self.read = len(rows), lambda begin, end: self.tokens[begin:end]

    def span(self, document):
        return int(self.ends[document]), int(self.ends[document + 1])


def test_beginnings_of_held_out_documents_are_continued_where_no_prompt_is_given():
    """Of documents that are long enough and free of braces; none is shown twice."""
    texts = ["too short", "uno dos tres quatro cinco seis siete", "a {} b c d e f", "one, two three! four five"] * 5
    model = task()
    model.__dict__["_trainer"] = SimpleNamespace(datamodule=SimpleNamespace(store=Splits(val=Held(texts))))
    assert model.held_out(n_words=6) == ["uno dos tres quatro cinco seis", "one, two three! four"]
    lines = model.show().splitlines()
    assert "continued" in lines[0] and any(line.startswith("  [uno dos tres quatro cinco seis]") for line in lines)
    model.trainer.datamodule.store = Splits()
    assert model.held_out(n_words=6) == [] and model.show() == ""


class Splits(dict):
    """A store of splits in memory."""

    splits = property(list)


def test_tokenizer_without_bos_is_refused():
    tokenizer = train_unigram(["some text of a few words"] * 9, 500)
    with pytest.raises(UserError, match="task=clm needs a bos token"):
        CausalLM(models.make("gpt"), tokenizer, OPTIM, lambda step, total: 1.0)
