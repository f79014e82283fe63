"""Classification: what each family is read at, metrics by hand, and predictions.jsonl over any number of ranks.

Run as a script this file is one of two ranks that test one net on 7 texts.
"""

import math
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer
from lmzoo.tasks.classification import AUROC, Classification
from lmzoo.tasks.downstream import Labelled
from torch.nn import functional as F

import downstream_run
import ranks
from downstream_run import TEXTS, TOKENIZER, held, learn
from lmzoo.errors import UserError

LABELS = ["json", "os", "re"]
SEVERAL = [[0], [0, 2], [], [1], [1, 2], [0, 1, 2], [2]]
METRICS = ["loss", "accuracy", "f1", "f1_weighted", "mcc", "auroc", "majority"]
task = partial(downstream_run.task, Classification)


def examples(labels=(0, 1, 2, 0, 1, 2, 0), **words):
    return downstream_run.examples(labels, **words)


def texts(collator, labels=(0, 1, 2, 0, 1, 2, 0), **words):
    return downstream_run.Texts(collator, examples(labels), LABELS, **words)


def evaluate(folder, rank=0, world=1, size=2, split="test", labels=(0, 1, 2, 0, 1, 2, 0), kind="class"):
    tested = task()
    data = texts(tested.collator, labels, kind=kind, rank=rank, world=world, size=size)
    return downstream_run.evaluate(folder, tested, data, world, split)


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
    """An encoder at its first token, a decoder at its last kept one, an encoder-decoder there when it reads again."""
    batch = Labelled(TOKENIZER.pad)(list(examples()))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    states = lambda head, hidden: hidden  # noqa: E731
    encoder, decoder, both = task("bert"), task("gpt"), task("t5")
    torch.testing.assert_close(pooled(encoder, batch), encoder.net(ids, mask, readout=states)[:, 0])
    last = decoder.net(ids, mask, readout=states)[range(len(ids)), mask.sum(1) - 1]
    torch.testing.assert_close(pooled(decoder, batch), last)
    last = both.net(ids, mask, ids, mask, readout=states)[range(len(ids)), mask.sum(1) - 1]
    torch.testing.assert_close(pooled(both, batch), last)
    torch.testing.assert_close(both.net(ids, mask), both.logits(batch))


def test_loss_is_torchs_and_smoothing_is_off_in_evaluation():
    model, batch = task(), Labelled(TOKENIZER.pad)(list(examples()))
    model.label_smoothing = 0.2
    logits = model.logits(batch)
    for training, smoothing in ((True, 0.2), (False, 0.0)):
        model.train(training)
        expected = F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(model.loss(batch)["loss"], expected)


@pytest.mark.parametrize("labels", [(0, 1, 2, 0, 1, 2, 0), SEVERAL])
@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_one_repeated_batch_is_learned(name, labels):
    assert learn(task(name), examples(labels)) < 0.02


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


@pytest.mark.parametrize(("kind", "labels"), [("class", (0, 1, 2, 0, 1, 2, 0)), ("classes", SEVERAL)])
def test_other_batch_sizes_give_the_same(tmp_path, kind, labels):
    expected = evaluate(tmp_path / "one", size=7, kind=kind, labels=labels)
    for size in (1, 3):
        assert same(evaluate(tmp_path / "small", size=size, kind=kind, labels=labels), expected)


def test_two_ranks_give_the_same(tmp_path):
    """Seven texts in four batches: rank 0 has four of them, rank 1 three; or in one: rank 1 has a filler only."""
    expected = evaluate(tmp_path / "one", size=7)
    found = ranks.run(__file__, tmp_path)
    for shared, filler in found:
        assert shared[0] == pytest.approx(expected[0], abs=1e-6)
        assert filler[0] == pytest.approx(expected[0], abs=1e-6)
    assert same(found[0][0], expected) and same(found[0][1], expected)


def same(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    for row, other in zip(found[1], expected[1], strict=True):
        assert row["probabilities"] == pytest.approx(other["probabilities"], abs=2e-6)
        assert {**row, "probabilities": None} == {**other, "probabilities": None}
    return True


def test_validation_shows_texts_and_writes_nothing(tmp_path):
    metrics, rows, shown = evaluate(tmp_path, split="val")
    assert metrics.keys() == {f"val/{name}" for name in METRICS}
    assert rows == [] and TEXTS[0] in shown
    assert task().show() == ""


def test_a_checkpoint_names_its_classes(tmp_path):
    tested, checkpoint = task(), {}
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).validate(
        tested, datamodule=texts(tested.collator), verbose=False)  # fmt: skip
    tested.on_save_checkpoint(checkpoint)
    assert checkpoint["lmzoo"]["labels"] == LABELS


def test_labels_that_are_not_the_heads_are_refused():
    tested = task()
    data = texts(tested.collator)
    data.labels = LABELS[:2]
    with pytest.raises(UserError, match="the data has 2 labels, but the model's head has 3 classes"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


def test_cut_texts_are_counted(tmp_path):
    tested = task()
    data = texts(tested.collator)
    data.rows = {"train": held(cut=1234, numbers=[0] * 9), "test": held(cut=0)}
    with pytest.warns(UserWarning, match="1,234 tokens of 12 texts of train are not read"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path).test(
            tested, datamodule=data, verbose=False)  # fmt: skip


def test_texts_without_a_label_are_refused():
    tested = task()
    data = texts(tested.collator)
    data.rows = {"test": held(unlabelled=3)}
    with pytest.raises(UserError, match=r"test has texts without a label \(3\): leave them out"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


def test_a_label_that_is_not_trained_on_is_refused():
    tested = task()
    data = texts(tested.collator)
    first, second, third = LABELS
    data.rows = {"train": held(labels=[first], numbers=[0] * 9), "test": held(labels=[third, first, second])}
    with pytest.raises(UserError, match=f"no text of train has the label '{third}', '{second}', which test has"):
        Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(tested, datamodule=data)


@pytest.mark.parametrize("said", [0, 1])
def test_a_net_that_always_says_the_same_has_no_correlation(said):
    """Of two classes, one of them rare: 0, as scikit-learn has it."""
    two = SimpleNamespace(n_outputs=2)
    metric = Classification.metrics_of(two, "class")["mcc"]
    metric.update(F.one_hot(torch.full((20,), said), 2).float(), torch.tensor([1] + [0] * 19))
    assert metric.compute() == 0
    metric.reset()
    metric.update(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
    assert metric.compute() == pytest.approx(0.5)  # (tp tn - fp fn) / sqrt(...) = 1 / sqrt(1 * 2 * 1 * 2)


def test_metrics_of_one_label_by_hand(tmp_path):
    """The confusions are [[2, 1, 0], [1, 1, 0], [0, 0, 2]] (label, prediction)."""
    labels, guesses = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 0, 1, 2, 2]
    tested = task()
    tested.logits = lambda batch: 3.0 * F.one_hot(torch.tensor(guesses), 3)
    found, _, _ = downstream_run.evaluate(tmp_path, tested, texts(tested.collator, labels, size=7))
    assert found["test/accuracy"] == pytest.approx(5 / 7)
    assert found["test/f1"] == pytest.approx((4 / 6 + 2 / 4 + 1) / 3)
    assert found["test/f1_weighted"] == pytest.approx((3 * 4 / 6 + 2 * 2 / 4 + 2 * 1) / 7)
    # Gorodkin's R_K: (5 * 7 - (3*3 + 2*2 + 2*2)) / (7*7 - (9 + 4 + 4)), as predictions are distributed as labels
    assert found["test/mcc"] == pytest.approx((35 - 17) / (49 - 17))
    # of pairs (in, out) of a class, those in the right order, ties a half: 0: (2*3 + (2*1 + 1*3)/2) / 12; 1: ...
    assert found["test/auroc"] == pytest.approx((8.5 / 12 + (4 + 5 / 2) / 10 + 1) / 3)
    assert found["test/majority"] == pytest.approx(3 / 7)
    assert tested.scores["majority"].counts.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 2]]
    assert (tmp_path / "confusion.png").stat().st_size > 5000


def test_metrics_of_several_labels_by_hand(tmp_path):
    marks = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1], [1, 1, 1], [1, 0, 1]])
    tested = task()
    tested.logits = lambda batch: (marks * 2.0 - 1) * 2
    data = texts(tested.collator, SEVERAL, kind="classes", size=7)
    found, rows, shown = downstream_run.evaluate(tmp_path, tested, data)
    assert [row["label"] for row in rows] == [[LABELS[i] for i in own] for own in SEVERAL]
    assert [row["prediction"] for row in rows] == [
        ["json"], ["json"], [], ["os", "re"], ["re"], LABELS, ["json", "re"]]  # fmt: skip
    # (true, false, missed): json (3, 1, 0), os (2, 0, 1), re (3, 1, 1); 4 of 21 decisions are wrong
    assert found["test/f1"] == pytest.approx((6 / 7 + 4 / 5 + 6 / 8) / 3)
    assert found["test/f1_micro"] == pytest.approx(16 / 20)
    assert found["test/exact_match"] == pytest.approx(3 / 7)
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    assert found["test/loss"] == pytest.approx((17 * right + 4 * wrong) / 21)
    assert not (tmp_path / "confusion.png").exists()
    assert "none (right)" in shown


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_what_differs_a_little_does_not_tie_in_bf16(name):
    """Logits of 100 and a little more, which bf16 could not tell apart: the head multiplies in fp32."""
    model = task(name)
    torch.nn.init.constant_(model.net.head.out.bias, 100.0)
    torch.nn.init.normal_(model.net.head.out.weight, std=1e-3)
    batch = model.collator(list(examples()))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(batch)
        assert len({*logits[:, 0].tolist()}) > 3 and logits.dtype == torch.float32
        assert model.net(batch["input_ids"], batch["attention_mask"])[:, 0].unique().numel() == 1
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 0]])
def test_auroc_is_of_the_classes_where_it_is_defined(labels):
    score = AUROC(num_classes=3, average="none", validate_args=False)
    score.update(torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.5, 0.2], [0.2, 0.8, 0.0]]), torch.tensor(labels))
    found = float(score.compute())
    assert math.isnan(found) if len(set(labels)) == 1 else found == pytest.approx(1 / 2)


def test_validation_of_nothing_names_all_metrics():
    """As is asked before a run begins, for `checkpoint.monitor`."""
    tested = task()
    tested.trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    tested.trainer.datamodule = texts(tested.collator)
    tested.setup("fit")
    assert set(tested.measured()) == {f"val/{name}" for name in METRICS}


def weighted(weights, labels, kind="class"):
    """A task that is ready to train on texts of these labels."""
    tested = task(settings={"class_weights": weights})
    tested.trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    tested.trainer.datamodule = data = texts(tested.collator, labels, kind=kind)
    data.rows = {"train": held(labels=LABELS, numbers=labels)}
    tested.setup("fit")
    return tested


def test_class_weights_by_hand():
    labels = [0, 0, 0, 0, 1, 2, 2]
    assert weighted("balanced", labels).weights.tolist() == pytest.approx([7 / 12, 7 / 3, 7 / 6])
    assert weighted("balanced", SEVERAL, "classes").weights.tolist() == pytest.approx([4 / 3, 4 / 3, 3 / 4])
    model = weighted([1, 2, 0], labels)
    batch = model.collator(list(examples(labels)))
    nats = -model.logits(batch).log_softmax(-1)[range(7), labels]
    expected = (nats * torch.tensor([1.0, 1, 1, 1, 2, 0, 0])).sum()
    torch.testing.assert_close(model.train().loss(batch)["loss"], expected)
    torch.testing.assert_close(model.eval().loss(batch)["loss"], nats.sum())  # as it is without
    model = weighted([1, 2, 0], SEVERAL, "classes").train()
    batch = model.collator(list(examples(SEVERAL)))
    p, marks = model.logits(batch).sigmoid(), batch["labels"]
    expected = -(marks * p.log() * torch.tensor([1.0, 2, 0]) + (1 - marks) * (1 - p).log()).sum()
    torch.testing.assert_close(model.loss(batch)["loss"], expected)


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, 2.0, -1.0], [1.0, 2.0, math.inf]])
def test_class_weights_that_are_not_the_classes_are_refused(weights):
    with pytest.raises(UserError, match="for each of the 3 classes: json, os, re"):
        weighted(weights, [0, 1, 2, 0, 1, 2, 0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    two = ranks.folder() / "two"
    ranks.save([evaluate(two, ranks.rank(), 2), evaluate(two, ranks.rank(), 2, size=7)])
