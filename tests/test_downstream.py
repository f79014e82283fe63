"""What tasks on labelled documents share: batches of pairs with token types, and whole runs by the command's words."""

import json

import numpy as np
import pytest
import torch
from lmzoo.tasks.classification import Classification
from lmzoo.tasks.downstream import Labelled

import downstream_run
import lmzoo
import tiny_run
from downstream_run import examples, task
from lmzoo.errors import UserError
from lmzoo.evaluate import evaluate
from marks import slow_but
from test_evaluate import configured

PAIR = {"tokens": np.array([1, 7, 8, 2, 9, 2]), "second": 4, "label": 1, "key": (0, 0, 3)}
ALONE = {"tokens": np.array([1, 7, 2]), "label": 0, "key": (0, 0, 5)}


@pytest.mark.parametrize("types", [True, False])
def test_pairs_have_token_types_by_hand(types):
    batch = Labelled(pad=0, types=types)([PAIR, ALONE])
    assert batch["second"].tolist() == [4, 3]
    expected = [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]] if types else None
    assert (batch["token_type_ids"].tolist() if "token_type_ids" in batch else None) == expected
    assert "second" not in Labelled(pad=0, types=types)([ALONE])


@pytest.mark.parametrize(("labels", "expected"), [
    ([2, None], {"labels": [2, -100]}),
    ([[0, 2], []], {"labels": [[1, 0, 1], [0, 0, 0]]}),
    ([[1], None], {"labels": [[0, 1, 0], [-100] * 3]}),
    ([-100.0, 2.5], {"labels": [0, 0], "numbers": [-100.0, 2.5]}),
])  # fmt: skip
def test_labels_by_hand(labels, expected):
    collator = Labelled(pad=0)
    collator.tell(["a", "b", "c"])
    found = collator.targets([{"label": label} for label in labels])
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected


def test_token_types_reach_a_net_that_has_them():
    pairs = lambda: examples([0, 1], ["a text", "more"], ["its other", "and more"])  # noqa: E731
    bert, gpt, t5 = (task(Classification, name) for name in ("bert", "gpt", "t5"))
    assert (bert.collator.types, gpt.collator.types, t5.collator.types) == (True, False, False)
    batch = bert.collator(list(pairs()))
    expected = bert.net(batch["input_ids"], batch["attention_mask"], token_type_ids=batch["token_type_ids"],
                        readout=lambda head, hidden: head(hidden, batch["attention_mask"]))  # fmt: skip
    torch.testing.assert_close(bert.logits(batch), expected)
    del batch["token_type_ids"]
    assert (bert.logits(batch) - expected).abs().max() > 1e-3
    for model in (gpt, t5):
        assert model.logits(model.collator(list(pairs()))).shape == (2, 3)


def test_texts_that_the_bases_tokenizer_does_not_know_are_said(tmp_path, capsys, caplog):
    """Where a run learns from them, and where they are measured; what it knows is not spoken of."""
    texts = tiny_run.texts(tmp_path)
    base = tiny_run.spoken(texts, *tiny_run.TASKS["mlm"], "tokenizer=wordpiece", "trainer.max_steps=1")
    lmzoo.fit(lmzoo.compose(*base, f"run_dir={tmp_path / 'base'}"))
    table = tmp_path / "strange.csv"
    table.write_text((tmp_path / "c.csv").read_text().replace("h", "\u4e2d"), encoding="utf-8")
    words = ("task=classification", "data=csv", f"init_from={tmp_path / 'base'}", "trainer.max_steps=1",
             "logger.wandb.mode=disabled")  # fmt: skip
    for path, expected in (table, True), (tmp_path / "c.csv", False):
        capsys.readouterr()
        lmzoo.fit(lmzoo.compose(*words, f"data.path={path}", f"run_dir={tmp_path / path.stem}"))
        assert ("% of the tokens of val are unknown to the tokenizer" in capsys.readouterr().out) == expected
        caplog.clear()
        evaluate(configured(f"ckpt={tmp_path / path.stem}"))
        assert ("of the tokens of val are unknown to the tokenizer" in caplog.text) == expected


def test_both_texts_of_a_pair_are_written(tmp_path):
    model = task(Classification, "bert")
    rows = examples([0, 1, 2], ["a text", "more", "x"], ["its other", "and more", "y"])
    data = downstream_run.Texts(model.collator, rows, ["a", "b", "c"])
    _, written, shown = downstream_run.evaluate(tmp_path, model, data)
    assert [(row["text"], row["second"]) for row in written] == [
        ("a text", "its other"), ("more", "and more"), ("x", "y")]  # fmt: skip
    assert "a text / its other" in shown


LABELS = {
    "classification": lambda text: "yes" if "a" in text else "no",
    "classes": lambda text: "|".join(sign for sign in "abc" if sign in text),
    "regression": lambda text: 10 * text.count("a") - 100,
    "token_classification": lambda text: " ".join("A" if "a" in word else "O" for word in text.split()),
}
WORDS = {
    "classification": ["task=classification", "task.class_weights=balanced", "data.pair_column=other"],
    "classes": ["task=classification", "task.labels=classes", "data.label_separator=|"],
    "regression": ["task=regression", "data.pair_column=other"],
    "token_classification": ["task=token_classification", "data.words_column=text", "data.tags_column=label"],
}


def source(path, kind, seed, n=60, unlabelled=0):
    """A csv of texts with labels of a kind, none in the first lines."""
    draw = np.random.default_rng(seed)
    texts = [" ".join("".join(draw.choice([*"abcdef"], 3)) for _ in range(draw.integers(3, 6))) for _ in range(n)]
    lines = [f"{text},{text[::-1]},{LABELS[kind](text) if i >= unlabelled else ''}" for i, text in enumerate(texts)]
    path.write_text("\n".join(["text,other,label", *lines]), encoding="utf-8")
    return path


def words(folder, kind, model, unlabelled=0):
    train = source(folder / "train.csv", kind, seed=0, unlabelled=unlabelled)
    test = source(folder / "test.csv", kind, seed=1)
    return [
        *tiny_run.TINY, f"model={model}", *WORDS[kind], "data=csv", f"data.path={train}", f"data.test_path={test}",
        f"run_dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "model"), slow_but([("classification", "bert"), ("regression", "gpt")], [
    ("classification", "bert"), ("classes", "t5"), ("regression", "gpt"), ("token_classification", "bert"),
]))  # fmt: skip
def test_a_run_of_each_kind_is_tested_and_evaluated_alike(tmp_path, kind, model):
    """Evaluation knows what the checkpoint says of the labels."""
    _, found = lmzoo.fit(lmzoo.compose(*words(tmp_path, kind, model)))
    predictions = list(map(json.loads, (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()))
    texts = [line.partition(",")[0] for line in (tmp_path / "test.csv").read_text().splitlines()[1:]]
    told = [row["text"] if "text" in row else " ".join(row["words"]) for row in predictions]
    assert all(text.startswith(own) for text, own in zip(texts, told, strict=True))  # in its order, long ones cut
    assert ("second" in predictions[0]) == ("data.pair_column=other" in WORDS[kind])
    best = next((tmp_path / "run" / "checkpoints").glob("best*"))
    again = evaluate(configured(f"ckpt={best}", "split=test"))
    assert again == pytest.approx({name: value for name, value in found.items() if name.startswith("test/")}, rel=1e-4)


@pytest.mark.parametrize("kind", ["classification", "regression", "token_classification"])
def test_texts_without_a_label_are_one_line(tmp_path, kind):
    given = words(tmp_path, kind, "bert", unlabelled=30)
    with pytest.raises(UserError, match="without a label|tags for"):
        lmzoo.fit(lmzoo.compose(*given))
