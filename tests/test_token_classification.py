"""Token classification: tags at first pieces only, metrics and written words by hand, alike for any batch size."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from lmzoo.tasks.token_classification import EntityF1, TokenClassification

import downstream_run
from downstream_run import TOKENIZER, held, learn

LABELS = ["O", "PER", "LOC"]
WORDS = [["Ada", "saw", "Rome"], ["go", "to", "Oslo", "now"], ["Bob"], ["it", "is", "so"], ["Max", "left"]]
TAGS = [[1, 0, 2], [0, 0, 2, 0], [1], [0, 0, 0], [1, 0]]
task = partial(downstream_run.task, TokenClassification, head="Tagger")


def rows():
    for sample, (words, tags) in enumerate(zip(WORDS, TAGS, strict=True)):
        [(ids, firsts)] = TOKENIZER.encode_firsts([words])
        marks = [-100, *(tags[word] if word >= 0 else -100 for word in firsts), -100]
        yield {"tokens": np.array(TOKENIZER.document(ids)), "tags": np.array(marks), "key": (0, 0, sample)}


def evaluate(folder, tested, size=2, **of_rows):
    data = downstream_run.Texts(tested.collator, rows(), LABELS, "tags", size=size)
    data.rows = {"test": held(**of_rows)}
    return downstream_run.evaluate(folder, tested, data)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_the_loss_is_of_the_tagged_positions(name):
    model = task(name)
    batch = model.collator(list(rows()))
    every = model.net(batch["input_ids"], batch["attention_mask"]).log_softmax(-1)
    nats = [-every[row, place, tag] for row, tags in enumerate(batch["labels"].tolist())
            for place, tag in enumerate(tags) if tag != -100]
    sums = model.loss(batch)
    torch.testing.assert_close(sums["loss"], torch.stack(nats).sum())
    assert sums["targets"] == len(nats) == 13


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_one_repeated_batch_is_learned(name):
    assert learn(task(name), rows()) < 0.02


def test_metrics_and_predictions_by_hand(tmp_path):
    """Guesses are right but for "saw", taken for PER, and "Oslo", taken for O."""
    guesses = [1, 1, 2, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]
    tested = task()
    tested.logits = lambda batch: torch.nn.functional.one_hot(torch.tensor(guesses), 3).float()
    found, written, shown = evaluate(tmp_path, tested, size=5)
    assert found["test/accuracy"] == pytest.approx(11 / 13)
    # (true, false, missed): O (7, 1, 1), PER (3, 1, 0), LOC (1, 0, 1)
    assert found["test/f1"] == pytest.approx((14 / 16 + 6 / 7 + 2 / 3) / 3)
    assert found["test/majority"] == pytest.approx(8 / 13)
    assert [row["words"] for row in written] == WORDS
    assert [row["tags"] for row in written] == [[LABELS[tag] for tag in tags] for tags in TAGS]
    assert written[0]["prediction"] == ["PER", "PER", "LOC"] and written[1]["prediction"] == ["O"] * 4
    assert "saw: PER (it is O)" in shown and "Oslo: O (it is LOC)" in shown and "all right" in shown


@pytest.mark.parametrize(("tags", "guesses", "expected"), [
    (["B-PER I-PER O B-LOC"], ["B-PER I-PER O B-LOC"], 1),
    (["B-PER I-PER O B-LOC", "O O I-ORG I-ORG"], ["B-PER I-PER O B-ORG", "O B-ORG I-ORG I-ORG"], 1 / 3),
    (["B-PER B-PER"], ["B-PER I-PER"], 0),  # two entities are not one of two words
    (["I-PER I-LOC O"], ["B-PER B-LOC O"], 1),  # where an entity begins without a B
    (["B-PER O", "B-PER"], ["B-PER O", "O"], 2 * (1 / 2) / (1 + 1 / 2)),
    (["O O"], ["O O"], math.nan),
])  # fmt: skip
def test_entities_by_hand(tags, guesses, expected):
    names = ["B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"]
    target, found = (torch.tensor([names.index(tag) for tag in " ".join(side).split()]) for side in (tags, guesses))
    metric = EntityF1(names)
    metric.update(torch.nn.functional.one_hot(found, 7), target, [len(row.split()) for row in tags])
    assert float(metric.compute()) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("names", "are"), [
    (["B-PER", "I-PER", "O"], True), (["I-X", "O"], True), (["O"], False), (["O", "PER"], False), (["B-", "O"], False),
])  # fmt: skip
def test_tags_of_entities_are_known_by_their_names(names, are):
    assert EntityF1.of(names) == are


@pytest.mark.parametrize("labels", [LABELS, ["O", "B-PER", "B-LOC"]])
def test_other_batch_sizes_give_the_same(tmp_path, labels, monkeypatch):
    monkeypatch.setitem(globals(), "LABELS", labels)
    expected = evaluate(tmp_path / "one", task("bert"), size=5)
    assert ("test/entity_f1" in expected[0]) == (labels[1] == "B-PER")
    for size in (1, 2):
        found = evaluate(tmp_path / "small", task("bert"), size=size)
        assert found[0] == pytest.approx(expected[0], abs=1e-6) and found[1] == expected[1]


def test_words_without_a_token_are_counted(tmp_path):
    with pytest.warns(UserWarning, match="nothing of 12 words of test"):
        evaluate(tmp_path, task(), untagged=12)
