"""Greedy and beam search equal `transformers.generate` token for token, on exported nets with noise on all weights."""

import random

import pytest
import torch

import models
from lmzoo import hf
from lmzoo.decoding import generate, search

transformers = pytest.importorskip("transformers")

N = 10  # new tokens
KINDS = {
    "gpt": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "t5": transformers.T5ForConditionalGeneration,
    "t5_v1_0": transformers.T5ForConditionalGeneration,
}
BEAMS = [(2, 1.0, 1), (4, 0.0, 3), (3, 2.0, 3), (5, -1.0, 5)]  # how many, length penalty, how many best


@pytest.mark.parametrize("seed", range(52))
def test_the_same_tokens(seed, tmp_path):
    """Prompts of unequal length, padded at the left; eos is a token that the net does say, so that some rows end."""
    draw, kind = random.Random(seed), list(KINDS)[seed % 4]
    words = {"n_kv_heads": draw.choice([1, 2, 4])} if kind == "llama" else {}
    ours = models.make(kind, seed=seed, vocab_size=draw.choice([30, 53]), n_layers=draw.choice([1, 2, 3]), **words)
    hf.to_hf(ours, tmp_path / "out")
    theirs = KINDS[kind].from_pretrained(tmp_path / "out").eval()
    length = draw.randint(1, 9)
    rows, mask = models.ids(3, length, vocab_size=ours.vocab_size, seed=seed), torch.ones(3, length, dtype=torch.long)
    for i in (1, 2):
        mask[i, : draw.randrange(length)] = 0
    start = 3 if ours.family == "encoder-decoder" else None
    eos = generate(ours, rows[:1], None, 5, start=start)[0, -1].item()
    settings = {"attention_mask": mask, "max_new_tokens": N, "do_sample": False, "eos_token_id": eos,
                "pad_token_id": eos, "decoder_start_token_id": start}  # fmt: skip
    assert generate(ours, rows, mask, N, eos=eos, start=start).tolist() == theirs.generate(rows, **settings).tolist()

    n_beams, length_penalty, n_best = BEAMS[seed // 4 % 4]
    penalty = 1.7 if mask.all() else 1.0  # transformers' penalty counts padding as a token that was there
    settings |= {"num_beams": n_beams, "length_penalty": length_penalty, "num_return_sequences": n_best,
                 "repetition_penalty": penalty, "early_stopping": False, "return_dict_in_generate": True,
                 "output_scores": True}  # fmt: skip
    expected = theirs.generate(rows, **settings)
    found, totals = search(ours, rows, mask, N, eos=eos, start=start, n_beams=n_beams, n_best=n_best,
                           length_penalty=length_penalty, repetition_penalty=penalty)  # fmt: skip
    assert found.flatten(0, 1).tolist() == expected.sequences.tolist()
    ends = found[:, :, length if start is None else 1 :] == eos
    lengths = torch.where(ends.any(-1), ends.int().argmax(-1) + 1, N)
    torch.testing.assert_close((totals / lengths**length_penalty).flatten(), expected.sequences_scores)


def test_a_repetition_penalty_gives_the_same_tokens(tmp_path):
    for kind, cls in KINDS.items():
        ours = models.make(kind)
        hf.to_hf(ours, tmp_path / kind)
        rows, start = models.ids(2, 6), 3 if ours.family == "encoder-decoder" else None
        words = {"do_sample": False, "pad_token_id": 0, "decoder_start_token_id": start, "max_new_tokens": N,
                 "min_new_tokens": N, "repetition_penalty": 1.5}  # fmt: skip
        expected = cls.from_pretrained(tmp_path / kind).eval().generate(rows, **words)
        got = generate(ours, rows, None, N, start=start, repetition_penalty=1.5)
        assert got.tolist() == expected.tolist() != generate(ours, rows, None, N, start=start).tolist()
