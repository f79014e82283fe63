"""Pseudo-perplexity: each token masked in turn, by hand from transformers' logits."""

import math

import pytest
import torch

from lmzoo import hf
from lmzoo.likelihood.pseudo_perplexity import PseudoPerplexity
from spoken import net
from test_sliding_window import TEXTS, Documents

transformers = pytest.importorskip("transformers")


def test_each_token_masked_in_turn(tmp_path):
    """Documents that fit whole; the longer ones in the window of 16 that has the token in its middle."""
    ours = net("bert", max_len=16)
    tokenizer = ours.tokenizer
    hf.to_hf(ours, tmp_path / "out")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    nats, correct, n = 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer.document(tokenizer.encode(text))
        for place in range(1, len(ids) - 1):
            begin = max(0, min(place - 8, len(ids) - 16))
            row = [*ids[:place], tokenizer.mask, *ids[place + 1 :]][begin : begin + 16]
            with torch.no_grad():
                logits = theirs(torch.tensor([row])).logits[0, place - begin]
            nats, n = nats - logits.log_softmax(-1)[ids[place]].item(), n + 1
            correct += logits.argmax().item() == ids[place]
    found = PseudoPerplexity(batch_size=7)(ours, Documents(tokenizer, *TEXTS))
    assert found["loss"] == pytest.approx(nats / n, abs=1e-5)
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(nats / n), rel=1e-5)
    assert found["accuracy"] == correct / n and found["tokens"] == n
