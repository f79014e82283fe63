"""Writing a text for a text: batches and scores by hand, alike for any batch size and number of ranks, whole runs.

Run as a script this file is one of two ranks that test one net on 7 pairs.
"""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from lmzoo.tasks.seq2seq import Seq2Seq, TextToText

import downstream_run
import lmzoo
import models
import ranks
import tiny_run
from downstream_run import OPTIM, TEXTS, TOKENIZER, examples, learn
from lmzoo.errors import UserError
from lmzoo.evaluate import evaluate as evaluate_run
from marks import slow_but
from test_evaluate import configured

PAIR = {"tokens": np.array([1, 7, 8, 2, 9, 5, 2]), "second": 4, "key": (0, 0, 3)}
SHORT = {"tokens": np.array([1, 6, 2, 4, 2]), "second": 3, "key": (0, 0, 5)}
ANSWERS = [text[::-1] for text in TEXTS]


def task(name, **settings):
    net = models.make(name, vocab_size=len(TOKENIZER), max_len=64)
    net.tokenizer = TOKENIZER
    return Seq2Seq(net, TOKENIZER, OPTIM, lambda step, total: 1.0, packing="single", **settings).eval()


def pairs():
    return examples([None] * len(TEXTS), TEXTS, ANSWERS)


class Pairs(downstream_run.Texts):
    def __init__(self, *args, **words):
        super().__init__(*args, None, "text", **words)
        self.rows["test"].length = 24
        self.rows["val"] = self.rows["test"]


def evaluate(folder, rank=0, world=1, size=2, name="t5", split="test", **settings):
    tested = task(name, max_answer=5, **settings)
    data = Pairs(tested.collator, pairs(), rank=rank, world=world, size=size)
    return downstream_run.evaluate(folder, tested, data, world, split)


def test_an_encoder_decoder_reads_one_text_and_writes_the_other():
    batch = TextToText(pad=0, start=3, bos=True)([PAIR, SHORT])
    assert {name: rows.tolist() for name, rows in batch.items()} == {
        "input_ids": [[7, 8, 2], [6, 2, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "decoder_input_ids": [[3, 9, 5], [3, 4, 0]], "decoder_attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[9, 5, 2], [4, 2, -100]], "sample": [3, 5],
    }  # fmt: skip


def test_a_document_without_bos_is_read_from_its_first_token():
    batch = TextToText(pad=0, start=3, bos=False)([PAIR | {"tokens": PAIR["tokens"][1:], "second": 3}])
    assert batch["input_ids"].tolist() == [[7, 8, 2]] and batch["labels"].tolist() == [[9, 5, 2]]


def test_a_decoder_goes_on_and_only_the_second_text_is_a_target():
    batch = TextToText(pad=0, start=None, bos=True)([PAIR, SHORT])
    assert {name: rows.tolist() for name, rows in batch.items()} == {
        "input_ids": [[1, 7, 8, 9, 5], [1, 6, 4, 0, 0]], "attention_mask": [[1] * 5, [1, 1, 1, 0, 0]],
        "labels": [[-100, -100, 9, 5, 2], [-100, 4, 2, -100, -100]], "sample": [3, 5],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_loss_is_torchs_over_what_is_to_be_written(name):
    model = task(name)
    batch = model.collator(list(pairs()))
    logits = model.net(*(batch[name] for name in batch if name.endswith("ids") or name.endswith("mask")))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    sums = model.loss(batch)
    torch.testing.assert_close(sums["loss"], expected)
    assert sums["targets"] == sum(len(text.encode()) + 1 for text in ANSWERS)  # a byte is a token, and eos


def test_scores_by_hand():
    """Of 5 words 4 are right, of 3, 2 and 1 longer pieces all; the texts that were asked for have 6."""
    model = task("t5")
    found = model.judged(["a b c d", "x"], ["a b c d", "y z"])
    assert found == {"answers": 2, "exact_match": 1, "rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert float(model.bleu.compute()) == pytest.approx(math.exp(1 - 6 / 5) * (4 / 5) ** (1 / 4))
    assert model.judged(["the cat sat"], ["the cat"])["rouge1"] == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))


@pytest.mark.parametrize("name", slow_but(["gpt"], ["gpt", "t5"]))
def test_what_is_learned_is_written(tmp_path, name):
    tested = task(name)
    assert learn(tested, pairs(), steps=300) < 0.05
    found, written, shown = downstream_run.evaluate(tmp_path, tested.eval(), Pairs(tested.collator, pairs()))
    assert written == [{"text": text, "target": answer, "prediction": answer}
                       for text, answer in zip(TEXTS, ANSWERS, strict=True)]  # fmt: skip
    assert found["test/exact_match"] == found["test/rouge1"] == 1 and found["test/bleu"] == pytest.approx(100)
    assert f"[{ANSWERS[0]}]" in shown


@pytest.mark.slow
def test_other_batch_sizes_and_two_ranks_give_the_same(tmp_path):
    """Of seven texts in four batches rank 1 has three and a filler; in one, nothing but a filler."""
    expected = evaluate(tmp_path / "one", size=7)
    assert {name.partition("/")[2] for name in expected[0]} == {
        "loss", "perplexity", "accuracy", "exact_match", "rouge1", "rouge2", "rougeL", "bleu"}  # fmt: skip
    found = ranks.run(__file__, tmp_path)
    for metrics, rows, _ in (evaluate(tmp_path / "small", size=3), *found[0]):
        assert metrics == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
        assert rows == expected[1]


@pytest.mark.parametrize("settings", [{}, {"n_beams": 3}])
@pytest.mark.parametrize(("name", "words"), [("gpt", {}), ("t5", {"position": "learned"}), ("t5", {})])
def test_each_row_writes_as_far_as_it_may_alone(name, words, settings):
    """Of 24 positions a decoder has 20, 12 and 2 left behind these prompts, whoever shares their batch."""
    net = models.make(name, vocab_size=len(TOKENIZER), max_len=24, **words)
    model = Seq2Seq(net, TOKENIZER, OPTIM, lambda step, total: 1.0, packing="single", **settings).eval()
    ids, mask = models.ids(3, 22, vocab_size=200), torch.ones(3, 22, dtype=torch.long)
    mask[0, 4:], mask[1, 12:] = 0, 0
    limits = torch.tensor([20, 12, 2])
    together = model.continued(ids, mask, limits)
    for row, n in enumerate(mask.sum(1).tolist()):
        alone = model.continued(ids[row : row + 1, :n], mask[row : row + 1, :n], limits[row : row + 1])
        assert model.up_to_eos(together[row]) == model.up_to_eos(alone[0])
        assert len(together[row]) == limits[row] or TOKENIZER.eos in together[row]


@pytest.mark.parametrize(("name", "words"), [("gpt", {}), ("t5", {"position": "learned"})])
def test_answers_end_where_the_positions_do(tmp_path, name, words):
    """max_answer says more tokens than a net of 64 positions can write, behind its prompt or behind the start."""
    net = models.make(name, vocab_size=len(TOKENIZER), max_len=64, **words)
    tested = Seq2Seq(net, TOKENIZER, OPTIM, lambda step, total: 1.0, packing="single", max_answer=64).eval()
    _, written, _ = downstream_run.evaluate(tmp_path, tested, Pairs(tested.collator, pairs()))
    assert [row["target"] for row in written] == ANSWERS


def test_a_validation_writes_for_some(tmp_path, monkeypatch):
    seen, judged = [], Seq2Seq.judged
    monkeypatch.setattr(Seq2Seq, "judged", lambda self, *both: seen.extend(both[1]) or judged(self, *both))
    evaluate(tmp_path, split="val", n_answers=3)
    assert seen == ANSWERS[:3]
    found, _, _ = evaluate(tmp_path, split="val", n_answers=0)
    assert seen == ANSWERS[:3] and found.keys() == {"val/loss", "val/perplexity", "val/accuracy"}


@pytest.mark.parametrize("n", [0, 3])
def test_the_metrics_are_known_ahead(tmp_path, n):
    tested = task("gpt", n_answers=n, max_answer=3)
    data = Pairs(tested.collator, pairs())
    found, _, _ = downstream_run.evaluate(tmp_path, tested, data, split="val")
    assert set(tested.measured()) == found.keys()


def source(path, n, seed):
    draw = np.random.default_rng(seed)
    texts = ["".join(draw.choice([*"abcd"], draw.integers(3, 7))) for _ in range(n)]
    path.write_text("\n".join(json.dumps({"text": text, "target": text[::-1]}) for text in texts), encoding="utf-8")
    return path


def words(folder, model, *more):
    return [*tiny_run.TINY, f"model={model}", "task=seq2seq", f"data.path={source(folder / 'a.jsonl', 60, 0)}",
            f"data.test_path={source(folder / 'b.jsonl', 9, 1)}", f"run_dir={folder / 'run'}",
            f"data.cache_dir={folder / 'cache'}", *more]  # fmt: skip


@pytest.mark.parametrize("model", slow_but(["transformer"], ["gpt", "transformer"]))
def test_a_run_is_tested_and_evaluated_alike(tmp_path, model):
    _, found = lmzoo.fit(lmzoo.compose(*words(tmp_path, model, "data.template=turn: {} !", "task.n_beams=2")))
    rows = list(map(json.loads, (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()))
    texts = list(map(json.loads, (tmp_path / "b.jsonl").read_text().splitlines()))
    assert [(row["text"], row["target"]) for row in rows] == [(f"turn: {t['text']} !", t["target"]) for t in texts]
    best = next((tmp_path / "run" / "checkpoints").glob("best*"))
    again = evaluate_run(configured(f"ckpt={best}", "split=test"))
    assert again == pytest.approx({name: value for name, value in found.items() if name.startswith("test/")}, rel=1e-4)


def test_other_text_is_measured_whole_without_the_column_of_the_runs_own(tmp_path):
    rows = [{"text": f"{i}", "target": f"{i}{i}", "part": ["train", "test"][i % 2]} for i in range(60)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = [word for word in words(tmp_path, "gpt") if not word.startswith(("data.path", "data.test_path"))]
    with tiny_run.lean():
        more = [f"data.path={tmp_path / 'c.jsonl'}", "data.split_column=part", "task.max_answer=2"]
        lmzoo.fit(lmzoo.compose(*own, *more))
    found = {}
    for name in ("b", "c"):  # which has no such column, and has it
        found[name] = configured(f"ckpt={tmp_path / 'run'}", f"data.path={tmp_path / name}.jsonl")
        assert found[name].data.split_column is None and found[name].data.reader.split_column is None
        assert math.isfinite(evaluate_run(found[name])["test/loss"])
    assert configured(f"ckpt={tmp_path / 'run'}").data.split_column == "part"


@pytest.mark.parametrize(("word", "line"), [
    ("data.template=turn", "has no place, or more than one, for the text"),
    ("data.template={} {}", "has no place, or more than one, for the text"),
    ("task.bleu_tokenizer=zzz", "task.bleu_tokenizer=zzz: .*choose one of .*13a"),
    ("data.pair_column=text", "data.pair_column: the task does not look at it"),
    ("data.target_column=answer", "no field data.target_column=answer; the fields are text, target"),
    ("model=bert", "task=seq2seq needs a model of family decoder or encoder-decoder"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path, word, line):
    with pytest.raises(UserError, match=line):
        lmzoo.fit(lmzoo.compose(*words(tmp_path, "gpt", word)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    two = ranks.folder() / "two"
    ranks.save([evaluate(two, ranks.rank(), 2), evaluate(two, ranks.rank(), 2, size=7)])
