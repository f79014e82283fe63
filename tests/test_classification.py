"""Classification: what each family is read at, metrics by hand, and predictions.jsonl over any number of ranks.

Run as a script this file is one of two ranks that test one net on 7 texts.
"""

import json
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, Trainer
from lmzoo.tasks.classification import Classification, Labelled
from torch.nn import functional as F
from torch.utils.data import DataLoader

import models
import ranks
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte

TOKENIZER = byte([], 400, sentinels=3)
LABELS = ["json", "os", "re"]
TEXTS = ["load a document", "list a folder", "match", "dump it", "walk the tree of folders", "search", "scan"]
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "optimizer": partial(torch.optim.AdamW)}
POOL = {"bert": "first", "gpt": "last", "t5": "last"}


def task(name="gpt", **words):
    head = {"_target_": "lmzoo.blocks.head.Classifier", "_partial_": True, "n_classes": 3, "pool": POOL[name]}
    net = models.make(name, vocab_size=len(TOKENIZER), head=head, **words)
    return Classification(net, TOKENIZER, OPTIM, lambda step, total: 1.0).eval()


def examples(texts=TEXTS):
    for sample, text in enumerate(texts):
        tokens = np.array(TOKENIZER.document(TOKENIZER.encode(text)))
        yield {"tokens": tokens, "label": sample % 3, "key": (0, 0, sample)}


def held(cut=0, unlabelled=0, labels=()):
    """What the task asks of a split's rows."""
    return SimpleNamespace(n_cut=cut, split=SimpleNamespace(n_unlabelled=unlabelled, labels=list(labels)))


class Texts(LightningDataModule):
    """Seven texts in batches of 2, shared out as the real data module does."""

    labels, rows = LABELS, {"test": held(cut=0)}

    def __init__(self, collator, rank=0, world=1, size=2):
        super().__init__()
        rows = list(examples())
        batches = [collator(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        self.batches = batches[rank::world]

    def evaluated(self, split):
        return [None]

    def val_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    test_dataloader = val_dataloader


def evaluate(folder, rank=0, world=1, size=2, split="test"):
    """(metrics, predictions) of one net on the texts; the predictions that it wrote, in the file's order."""
    tested = task()
    shared = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if world == 2 else {}
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=folder, **shared)
    run = {"test": trainer.test, "val": trainer.validate}[split]
    (metrics,) = run(tested, datamodule=Texts(tested.collator, rank, world, size), verbose=False)
    file = Path(folder) / "predictions.jsonl"
    written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return metrics, written, tested.show()


def test_collator_by_hand():
    rows = [{"tokens": np.array([1, 11, 12, 2]), "label": 2, "key": (0, 5, 9)},
            {"tokens": np.array([1, 0, 2]), "label": 0, "key": (0, 5, 4)}]  # fmt: skip
    batch = Labelled(pad=0)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 11, 12, 2], [1, 0, 2, 0]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
        "labels": [2, 0],
        "sample": [9, 4],
    }
    assert Labelled(pad=0).window(128) == (128, None)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_the_side_of_the_padding_changes_no_logit(name):
    model = task(name)
    tokens = torch.tensor([TOKENIZER.document(TOKENIZER.encode("load a document"))])
    ones, pad, none = torch.ones_like(tokens), torch.full((1, 3), TOKENIZER.pad), torch.zeros(1, 3, dtype=torch.long)
    alone = model.logits({"input_ids": tokens, "attention_mask": ones})
    for side in (1, -1):
        padded = torch.cat([tokens, pad][::side], 1)
        mask = torch.cat([ones, none][::side], 1)
        logits = model.logits({"input_ids": padded, "attention_mask": mask})
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def pooled(model, batch):
    """What the head's dense layer is given."""
    seen = []
    handle = model.net.head.dense.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model.logits(batch)
    handle.remove()
    return seen[0]


def test_what_each_family_is_read_at():
    """An encoder at its first token, a decoder at its last kept one, an encoder-decoder at the start token."""
    batch = Labelled(TOKENIZER.pad)(list(examples()))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    states = lambda head, hidden: hidden  # noqa: E731
    encoder, decoder, both = task("bert"), task("gpt"), task("t5")
    torch.testing.assert_close(pooled(encoder, batch), encoder.net(ids, mask, readout=states)[:, 0])
    last = decoder.net(ids, mask, readout=states)[range(len(ids)), mask.sum(1) - 1]
    torch.testing.assert_close(pooled(decoder, batch), last)
    start = torch.full((len(ids), 1), TOKENIZER.start)
    torch.testing.assert_close(pooled(both, batch), both.net(ids, mask, start, readout=states)[:, 0])


def test_loss_is_torchs_and_smoothing_is_off_in_evaluation():
    model, batch = task(), Labelled(TOKENIZER.pad)(list(examples()))
    model.label_smoothing = 0.2
    logits = model.logits(batch)
    for training, smoothing in ((True, 0.2), (False, 0.0)):
        model.train(training)
        expected = F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(model.loss(batch)["loss"], expected)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_one_repeated_batch_is_learned(name):
    model, batch = task(name).train(), Labelled(TOKENIZER.pad)(list(examples()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(80):
        optimizer.zero_grad()
        sums = model.loss(batch)
        (sums["loss"] / sums["targets"]).backward()
        optimizer.step()
    assert sums["loss"] / sums["targets"] < 0.02
    assert sums["correct"] == sums["targets"] == 7


def test_predictions_and_metrics(tmp_path):
    """Each text once and in order, with its probabilities; metrics as counted from the file, by hand."""
    metrics, rows, shown = evaluate(tmp_path)
    assert [row["text"] for row in rows] == TEXTS
    assert [row["label"] for row in rows] == [LABELS[i % 3] for i in range(7)]
    for row in rows:
        assert list(row) == ["text", "label", "prediction", "probabilities"]
        assert list(row["probabilities"]) == LABELS
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(row["probabilities"], key=row["probabilities"].get)
    hits = [row["label"] == row["prediction"] for row in rows]
    assert metrics["test/accuracy"] == pytest.approx(sum(hits) / 7)
    assert metrics["test/majority"] == pytest.approx(3 / 7)
    nats = [-np.log(row["probabilities"][row["label"]]) for row in rows]
    assert metrics["test/loss"] == pytest.approx(np.mean(nats), abs=1e-5)
    scores = []
    for name in {row["label"] for row in rows} | {row["prediction"] for row in rows}:
        true = sum(row["label"] == row["prediction"] == name for row in rows)
        scores.append(2 * true / sum((row["label"] == name) + (row["prediction"] == name) for row in rows))
    assert metrics["test/f1"] == pytest.approx(np.mean(scores), abs=1e-6)
    assert TEXTS[0] in shown and rows[0]["prediction"] in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_two_ranks_and_other_batch_sizes_give_the_same(tmp_path):
    """Seven texts in four batches: rank 0 has four of them, rank 1 three, and the file is the one of a single rank."""
    expected = evaluate(tmp_path / "one", size=7)
    assert same(evaluate(tmp_path / "small", size=1), expected)
    found = ranks.run(__file__, tmp_path)
    assert same(found[0], expected)
    assert found[1][0] == pytest.approx(expected[0], abs=1e-6)


def same(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    for row, other in zip(found[1], expected[1], strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
        assert {**row, "probabilities": None} == {**other, "probabilities": None}
    return True


def test_validation_shows_texts_and_writes_nothing(tmp_path):
    metrics, rows, shown = evaluate(tmp_path, split="val")
    assert metrics.keys() == {"val/loss", "val/accuracy", "val/f1", "val/majority"}
    assert rows == [] and TEXTS[0] in shown
    assert task().show() == ""


def test_a_checkpoint_names_its_classes(tmp_path):
    tested, checkpoint = task(), {}
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).validate(
        tested, datamodule=Texts(tested.collator), verbose=False)  # fmt: skip
    tested.on_save_checkpoint(checkpoint)
    assert checkpoint["lmzoo"]["labels"] == LABELS


def test_labels_that_are_not_the_heads_are_refused():
    tested = task()
    data = Texts(tested.collator)
    data.labels = LABELS[:2]
    with pytest.raises(UserError, match="the data has 2 labels, but the model's head has 3 classes"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


def test_cut_texts_are_counted(tmp_path):
    tested = task()
    data = Texts(tested.collator)
    data.rows = {"train": held(cut=1234), "test": held(cut=0)}
    with pytest.warns(UserWarning, match="1,234 tokens of train are not read"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).test(
            tested, datamodule=data, verbose=False)  # fmt: skip


def test_texts_without_a_label_are_refused():
    tested = task()
    data = Texts(tested.collator)
    data.rows = {"test": held(unlabelled=3)}
    with pytest.raises(UserError, match="3 texts of test have no label"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


def test_a_label_that_is_not_trained_on_is_refused():
    tested = task()
    data = Texts(tested.collator)
    first, second, third = LABELS
    data.rows = {"train": held(labels=[first]), "test": held(labels=[third, first, second])}
    with pytest.raises(UserError, match=f"no text of train has the label '{third}', '{second}', which test has"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks.save(evaluate(ranks.folder() / "two", ranks.rank(), 2))
