"""Classification by names that are written: the likelihood of each name, its loss, and the whole command.

Run as a script this file is one of two ranks that test one net on 7 texts.
"""

import json
import warnings

import numpy as np
import pytest
import torch
from lmzoo.tasks import text_labels
from lmzoo.tasks.text_labels import Named, TextLabels
from torch.nn import functional as F

import downstream_run
import lmzoo
import models
import ranks
from downstream_run import OPTIM, TEXTS, TOKENIZER, examples, learn
from lmzoo.decoding.answering import answer
from lmzoo.errors import UserError
from lmzoo.evaluate import evaluate as evaluate_command
from lmzoo.tokenizer import train_wordpiece
from test_evaluate import configured

LABELS = ["json", "os", "regular expressions"]
TRUE = (0, 1, 2, 0, 1, 2, 0)
NAMES = [[*TOKENIZER.encode(label), TOKENIZER.eos] for label in LABELS]


def task(name="t5", labels=LABELS, tokenizer=TOKENIZER, settings=None, **words):
    net = models.make(name, vocab_size=len(tokenizer), **words)
    made = TextLabels(net, tokenizer, OPTIM, lambda step, total: 1.0, **(settings or {})).eval()
    made.collator.tell(labels)
    made.labels = labels
    return made


def evaluate(folder, rank=0, world=1, size=2, split="test"):
    tested = task()
    data = downstream_run.Texts(tested.collator, examples(TRUE), LABELS, rank=rank, world=world, size=size)
    return downstream_run.evaluate(folder, tested, data, world, split)


@torch.no_grad()
def by_hand(net, text, name):
    """log p of a name's tokens, one text and one name at a time, without any padding."""
    ids = torch.tensor([TOKENIZER.document(TOKENIZER.encode(text))])
    logits = net(ids, None, torch.tensor([[TOKENIZER.start, *name[:-1]]]))[0]
    return logits.log_softmax(-1)[range(len(name)), name]


def test_collator_by_hand():
    collator = Named(TOKENIZER, {"b": "a"}, None)
    collator.tell(["long", "b"])
    row = {"tokens": np.array([7, 8, 2]), "key": (0, 0, 5)}
    batch = collator([row | {"label": 1}, row | {"label": 0}, row | {"label": None}])
    (a,), word, eos, start = TOKENIZER.encode("a"), TOKENIZER.encode("long"), TOKENIZER.eos, TOKENIZER.start
    rest, pad = [-100] * (len(word) - 1), [TOKENIZER.pad] * (len(word) - 1)
    assert batch["labels"].tolist() == [1, 0, -100]
    assert batch["decoder_labels"].tolist() == [[a, eos, *rest], [*word, eos], [-100, -100, *rest]]
    assert batch["decoder_input_ids"].tolist()[:2] == [[start, a, *pad], [start, *word]]
    assert batch["decoder_attention_mask"].tolist()[:2] == [[1, 1, *[0] * len(rest)], [1] * (len(word) + 1)]
    assert batch["input_ids"].tolist() == [[7, 8, 2]] * 3


@pytest.mark.parametrize("at_once", [1, 20, 512])
@pytest.mark.parametrize("name", ["t5", "t5_v1_0", "transformer"])
def test_a_class_is_as_likely_as_its_name(name, at_once, monkeypatch):
    monkeypatch.setattr(text_labels, "AT_ONCE", at_once)
    model = task(name)
    found = model.logits(model.collator(list(examples(TRUE))))
    expected = torch.tensor([[by_hand(model.net, text, name).sum() for name in NAMES] for text in TEXTS])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_names_of_learned_positions_may_reach_to_the_last_together_and_no_further():
    model = task("t5", position="learned", max_len=26)  # the longest text
    assert sum(map(len, NAMES)) > 26 >= max(map(len, NAMES))
    found = model.logits(model.collator(list(examples(TRUE))))
    expected = torch.tensor([[by_hand(model.net, text, name).sum() for name in NAMES] for text in TEXTS])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(UserError, match="the decoder's 19 positions are too few for 'regular expressions' of"):
        task("t5", position="learned", max_len=19)


def test_loss_is_that_of_the_own_names_tokens():
    model = task(settings={"label_smoothing": 0.2, "z_loss": 0.01})
    batch = model.collator(list(examples(TRUE)))
    plain = -sum(by_hand(model.net, text, NAMES[label]).sum() for text, label in zip(TEXTS, TRUE, strict=True))
    logits = model.logits(batch)
    for sums in (model.loss(batch), model.judged(logits, batch)):
        torch.testing.assert_close(sums["loss"], plain, rtol=1e-5, atol=1e-4)
        assert sums["targets"] == 7 and sums["nll"] == sums["loss"]
    model.train()
    names = [name for label in TRUE for name in NAMES[label]]
    whole = model.net(*(batch[word] for word in (
        "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")))[batch["decoder_labels"] != -100]
    expected = F.cross_entropy(whole, torch.tensor(names), reduction="sum", label_smoothing=0.2)
    expected = expected + 0.01 * whole.logsumexp(-1).square().sum()
    torch.testing.assert_close(model.loss(batch)["loss"], expected)


def test_class_weights_weigh_texts():
    model = task().train()
    batch = model.collator(list(examples(TRUE)))
    model.weights = torch.tensor([0.5, 2.0, 0.0])
    nats = [-by_hand(model.net, text, NAMES[label]).sum() for text, label in zip(TEXTS, TRUE, strict=True)]
    expected = sum(model.weights[label] * own for own, label in zip(nats, TRUE, strict=True))
    torch.testing.assert_close(model.loss(batch)["loss"], expected, rtol=1e-5, atol=1e-4)


def test_what_is_learned_is_written():
    """One repeated batch is learned, by names of unequal length, and the net then writes them."""
    labels = ["json", "os", "re"]
    model = task(labels=labels)
    assert learn(model, examples(TRUE), steps=300) < 0.02
    model.eval()
    assert model.logits(model.collator(list(examples(TRUE)))).argmax(-1).tolist() == [*TRUE]
    model.net.tokenizer = TOKENIZER
    written = answer(model.net, TEXTS, max_new_tokens=30)
    assert [row[0]["answer"] for row in written] == [labels[label] for label in TRUE]


def test_predictions_and_metrics(tmp_path):
    metrics, rows, shown = evaluate(tmp_path)
    net = task().net
    nats = [[float(by_hand(net, text, name).sum()) for name in NAMES] for text in TEXTS]
    for row, own, text, label in zip(rows, torch.tensor(nats).softmax(-1).tolist(), TEXTS, TRUE, strict=True):
        assert (row["text"], row["label"]) == (text, LABELS[label])
        assert list(row["probabilities"].values()) == pytest.approx(own, abs=1e-4)
    right = [own.index(max(own)) == label for own, label in zip(nats, TRUE, strict=True)]
    assert metrics["test/accuracy"] == pytest.approx(sum(right) / 7)
    mean = np.mean([own[label] for own, label in zip(nats, TRUE, strict=True)])
    assert metrics["test/loss"] == pytest.approx(-mean, rel=1e-5)
    assert TEXTS[0] in shown
    assert (tmp_path / "confusion.png").exists()


def test_two_ranks_and_other_batches_give_the_same(tmp_path):
    expected = evaluate(tmp_path / "one", size=7)
    found = [one for rank in ranks.run(__file__, tmp_path) for one in rank] + [evaluate(tmp_path / "three", size=3)]
    for metrics, rows, _ in found:
        assert metrics == pytest.approx(expected[0], abs=1e-5)
        assert [row["prediction"] for row in rows] == [row["prediction"] for row in expected[1]]


@pytest.mark.parametrize("words", ['{"größer, 1.0": "big: y"}', "{'größer, 1.0': 'big: y'}", {"größer, 1.0": "big: y"}])
def test_words_of_any_label_are_said_in_json_or_yaml(words):
    collator = Named(TOKENIZER, words, None)
    collator.tell(["größer, 1.0", "os"])
    assert [TOKENIZER.decode(name[:-1].tolist()) for name in collator.names] == ["big: y", "os"]


def test_one_class_alone_is_refused(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("text,label\n" + "".join(f"text {i},x\n" for i in range(90)))
    config = lmzoo.compose("model=t5", "task=classification", "task/head=text", "data=csv", f"data.path={table}",
                           "tokenizer=byte", f"run_dir={tmp_path}/run")  # fmt: skip
    with pytest.raises(UserError, match="every text has the label 'x': a task of classes needs two or more"):
        lmzoo.fit(config)


@pytest.mark.parametrize(("words", "line"), [
    ({"perl": "x"}, "task.words.perl: no text has this label; the labels are json, os"),
    ({"os": "json"}, "task.words: two labels have one word"),
    ({"os": " "}, "task.words.os=' ' should be a text"),
    ('{"ö s": "x"}', "task.words.ö s: no text has this label"),
    ("[a", "task.words: write them as task.words.LABEL=WORD or task.words='{\"LABEL\": \"WORD\"}'"),
    ("x", "task.words: write them as"),
])
def test_words_that_say_no_class_are_refused(words, line):
    with pytest.raises(UserError, match=line):
        Named(TOKENIZER, words, None).tell(["json", "os"])


def test_a_name_without_tokens_is_refused():
    tokenizer = train_wordpiece(["abc abc abc"], 120)
    Named(tokenizer, {}, None).tell(["a", "b"])
    with pytest.raises(UserError, match="no token for a part of 'd' of the class d: give it another, task.words.d="):
        Named(tokenizer, {}, None).tell(["a", "d"])
    Named(tokenizer, {"d": "c"}, None).tell(["a", "d"])
    with pytest.raises(UserError, match=r"the tokenizer makes nothing of '\\u200b' of the class d"):
        Named(tokenizer, {"d": "\u200b"}, None).tell(["a", "d"])
    with pytest.raises(UserError, match="makes the same of the class A and of 'a' of the class a: give it"):
        Named(tokenizer, {}, None).tell(["A", "a"])  # it is of small letters alone


@pytest.mark.parametrize("words", [["task/head=text"], ["task/head=text", "task.words.cat=tom"]])
def test_the_whole_command(words, tmp_path, capsys):
    """From scratch, started from, evaluated again with the same numbers, and asked for a class in words."""
    labelled = tmp_path / "labelled.csv"
    labelled.write_text("text,label\n" + "".join(f"the {animal} sat {i} times,{animal}\n" for i in range(40)
                                                 for animal in ("cat", "dog")), encoding="utf-8")  # fmt: skip
    small = ["size=tiny", "model.d_model=32", "model.n_layers=1", "model.n_heads=2", "model.d_ff=32"]
    given = ["task=classification", *words, "data=csv", f"data.path={labelled}", "data.batch_size=8", "optim.lr=0.01",
             "trainer.precision=32-true", "logger.wandb.mode=disabled", "tokenizer=byte"]  # fmt: skip
    scratch = ["model=t5", *small, "trainer.max_steps=200", f"run_dir={tmp_path / 'run'}"]
    net, metrics = lmzoo.fit(lmzoo.compose(*given, *scratch))
    assert metrics["val/accuracy"] == 1
    assert net.config["head"]["_target_"].endswith("head.Linear")  # its own
    again = evaluate_command(configured(f"ckpt={tmp_path / 'run'}"))
    assert again["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-4)
    said = "tom" if len(words) > 1 else "cat"
    assert answer(net, ["the cat sat 3 times"], max_new_tokens=20)[0][0]["answer"] == said
    on = ["trainer.max_steps=2", f"init_from={tmp_path / 'run'}", f"run_dir={tmp_path / 'on'}"]
    _, metrics = lmzoo.fit(lmzoo.compose(*(word for word in given if not word.startswith("tokenizer")), *on))
    assert metrics["val/accuracy"] == 1  # nothing of the net was thrown away
    assert json.loads((tmp_path / "on" / "result.json").read_text()) == metrics


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    two = ranks.folder() / "two"
    ranks.save([evaluate(two, ranks.rank(), 2), evaluate(two, ranks.rank(), 2, size=7)])
