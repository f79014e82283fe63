"""Distributions against the exact ones and transformers' own processors, and what a draw depends on."""

import pytest
import torch

from lmzoo.decoding import generate
from lmzoo.decoding.sampling import distribution, draw, penalise, uniforms
from models import ids, make

N = 10_000
WORDS = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


def logits(rows=1, vocabulary=200, seed=0):
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def exact(scores, words):
    """Probabilities (B, V), normalised."""
    probabilities, ids = distribution(scores, **words)
    if ids is not None:
        probabilities = torch.zeros_like(scores).scatter(1, ids, probabilities)
    return probabilities / probabilities.sum(-1, keepdim=True)


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_what_is_left_is_what_transformers_leaves(words):
    library = pytest.importorskip("transformers.generation.logits_process")
    kinds = {"temperature": "Temperature", "top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
    scores = expected = logits(rows=20)
    for word, kind in kinds.items():
        if word in words:
            expected = getattr(library, f"{kind}LogitsWarper")(words[word])(None, expected)
    torch.testing.assert_close(exact(scores, words), expected.softmax(-1))


def test_the_penalty_is_transformers():
    library = pytest.importorskip("transformers.generation.logits_process")
    scores, rows = logits(rows=4), ids(4, 12, vocab_size=200)
    seen = torch.zeros(4, 200, dtype=torch.bool).scatter(1, rows, True)
    for penalty in (0.5, 1.0, 1.7):
        expected = library.RepetitionPenaltyLogitsProcessor(penalty)(rows, scores.clone())
        assert torch.equal(penalise(scores, seen, penalty), expected)


@pytest.mark.parametrize("words", [{"temperature": 1.0}, *WORDS], ids=str)
def test_draws_agree_with_the_exact_probabilities(words):
    """Seed 0: within four standard deviations of every p > 1e-3, and nothing where p is 0."""
    scores = logits()
    p = exact(scores, words)[0].double()
    drawn = draw(*distribution(scores.expand(N, -1), **words), uniforms(0, N, 1, scores.device)[:, 0])
    counts = torch.bincount(drawn, minlength=200)
    likely = p > 1e-3
    assert likely.sum() > 3
    assert ((counts - N * p).abs() < 4 * (N * p * (1 - p)).sqrt())[likely].all()
    assert (counts[p == 0] == 0).all()


def test_a_nets_draws_agree_with_its_softmax():
    net, row = make("gpt"), ids(1, 4)
    with torch.no_grad():
        p = (net(row)[0, -1] / 0.8).softmax(-1).double()
    tokens = generate(net, row.repeat(N, 1), max_new_tokens=1, temperature=0.8)[:, -1]
    counts, likely = torch.bincount(tokens, minlength=50), p > 1e-3
    assert ((counts - N * p).abs() < 4 * (N * p * (1 - p)).sqrt())[likely].all()


def test_the_ends_of_the_unit_interval_choose_what_can_be():
    """The smallest and the largest u, with impossible tokens at both ends."""
    probabilities = torch.tensor([[0.0, 0.0, 0.25, 0.5, 0.0, 0.25, 0.0]])
    for u, id in ((2**-53, 2), (0.25, 2), (0.25 + 1e-9, 3), (0.75, 3), (0.75 + 1e-9, 5), (1.0, 5)):
        assert draw(probabilities, None, torch.tensor([u], dtype=torch.float64)).item() == id


def test_a_rows_numbers_are_its_seeds():
    numbers = uniforms(5, 3, 20, torch.device("cpu"))
    assert ((numbers > 0) & (numbers <= 1)).all() and len(numbers.unique()) == 60
    assert torch.equal(uniforms(6, 2, 20, torch.device("cpu")), numbers[1:])
    assert torch.equal(uniforms(5, 3, 7, torch.device("cpu")), numbers[:, :7])  # more tokens: the same beginning
