"""Log-probabilities of tokens: those of transformers' own nets, token by token; batched as alone, in order."""

import pytest
import torch

import models
from lmzoo import hf
from lmzoo.likelihood.scoring import BATCHES, Row, score
from spoken import net

transformers = pytest.importorskip("transformers")
KINDS = {"gpt": "CausalLM", "llama": "CausalLM", "bert": "MaskedLM", "t5": "Seq2SeqLM"}


def rows(n, answers=False):
    """Rows of 1 to 13 ids, each of whose positions asks for a token or not."""
    found = []
    for i in range(n):
        ids, source = (models.ids(1 + (n * i) % 13, vocab_size=250, seed=n + i).tolist() for n in (7, 5))
        asked = models.ids(len(ids), vocab_size=250, seed=100 + i).tolist()
        labels = [label if label % 3 else -100 for label in asked[:-1]] + asked[-1:]
        found.append(Row(ids, labels, source if answers else (), i))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_probabilities_of_transformers(kind, tmp_path):
    ours = net(kind)
    given = rows(9, answers=kind == "t5")
    hf.to_hf(ours, tmp_path / "out")
    theirs = getattr(transformers, f"AutoModelFor{KINDS[kind]}").from_pretrained(tmp_path / "out").eval()
    for row, found in zip(given, score(ours, given, batch_size=4), strict=True):
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            logits = theirs(torch.tensor([row.source]), decoder_input_ids=ids) if row.source else theirs(ids)
        logits = logits.logits[0]
        expected = [logits[i].log_softmax(-1)[label].item() for i, label in enumerate(row.labels) if label != -100]
        likeliest = [logits[i].argmax().item() == label for i, label in enumerate(row.labels) if label != -100]
        assert found.log_probabilities.tolist() == pytest.approx(expected, abs=1e-5)
        assert found.likeliest.tolist() == likeliest and found.key == row.key


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_in_batches_as_alone(kind, batch_size):
    model, given = net(kind), rows(20, answers=kind == "t5")
    together = list(score(model, given, batch_size))
    assert [found.key for found in together] == list(range(20))
    for row, found in zip(given, together, strict=True):
        (alone,) = score(model, [row], 1)
        assert found.log_probabilities.tolist() == pytest.approx(alone.log_probabilities.tolist(), abs=1e-5)


def test_rows_are_read_a_window_at_a_time():
    model, asked = net("gpt"), []
    given = (asked.append(row.key) or row for row in rows(3 * BATCHES))
    next(score(model, given, batch_size=1))
    assert len(asked) == BATCHES
