"""How weights begin: their deviations, kind by kind, and the first loss that follows from them."""

import math

import pytest
import torch

from lmzoo.checkpoint import build
from models import config, ids, logits

SIZES = {"d_model": 64, "n_layers": 3, "n_heads": 4, "d_ff": 128, "max_len": 64, "vocab_size": 500}


def fresh(name, seed=0, **words):
    torch.manual_seed(seed)
    return build(config(name, **words))


def deviations(net):
    """{name: deviation} of every matrix and table; biases are all 0 and norms all 1."""
    found = {}
    for name, p in net.named_parameters():
        if p.ndim < 2:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        else:
            found[name] = p.std().item()
    return found


def check(net, rule):
    """Within five of its own deviations, 1/sqrt(2 n), each deviation is what ``rule(name)`` says."""
    for name, got in deviations(net).items():
        expected, n = rule(name), net.get_parameter(name).numel()
        assert got == pytest.approx(expected, rel=5 / math.sqrt(2 * n)), name


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_normal(name):
    check(fresh(name, **SIZES), lambda name: 0.02)


@pytest.mark.parametrize("n_layers", [3, 8])
def test_gpt2_divides_what_is_added_to_the_residual_stream(n_layers):
    residual = ("attn.out.weight", "ffn.down.weight")
    check(fresh("gpt", **SIZES | {"n_layers": n_layers}),
          lambda name: 0.02 / math.sqrt(2 * n_layers) if name.endswith(residual) else 0.02)  # fmt: skip


@pytest.mark.parametrize("name", ["t5", "t5_v1_0"])
def test_t5(name):
    # d_model 64, d_ff 128, heads of 8: inner width 32
    rules = {"embed.tokens": 1.0, "table": 64**-0.5, "q": (64 * 8) ** -0.5, "k": 64**-0.5, "v": 64**-0.5,
             "out": 32**-0.5, "up": 64**-0.5, "gate": 64**-0.5, "down": 128**-0.5, "head": 64**-0.5}  # fmt: skip

    def rule(name):
        return next(std for kind, std in rules.items() if name.removesuffix(".weight").endswith(kind))

    check(fresh(name, **SIZES, d_head=8), rule)


def test_xavier_is_uniform_by_both_widths():
    net = fresh("transformer", **SIZES)
    for name, std in deviations(net).items():
        p = net.get_parameter(name)
        if name == "embed.tokens.weight":
            assert std == pytest.approx(1 / 8, rel=0.03)
        else:
            bound = math.sqrt(6 / sum(p.shape))
            assert 0.99 * bound < p.abs().max() <= bound and std == pytest.approx(bound / math.sqrt(3), rel=0.03), name


def first_loss(net, vocab_size, n_targets=16384):
    """Mean cross-entropy against targets drawn at random, 64 to a position."""
    rows = ids(8, 32, vocab_size=vocab_size)
    targets = ids(rows.numel(), n_targets // rows.numel(), vocab_size=vocab_size, seed=2)
    with torch.no_grad():
        scores = logits(net, rows).flatten(0, 1).log_softmax(-1)
    return -scores.gather(1, targets).mean().item()


VOCAB = 4096


@pytest.mark.parametrize(
    "name, words, std",
    [
        ("gpt", {}, 0.02),
        ("bert", {}, 0.02),
        ("llama", {}, 0.02),
        ("llama", {"init": {"_target_": "lmzoo.blocks.init.normal", "_partial_": True, "std": 0.1}}, 0.1),
        ("transformer", {"d_model": 32}, 32**-0.5),  # embeddings N(0, 1/d_model), tied
        ("t5", {}, 64**-0.5),  # hidden states of unit RMS against a head of N(0, 1/d): ln V + 1/2
        ("t5_v1_0", {"d_model": 32}, 32**-0.5),  # tied to N(0, 1), hidden states divided by sqrt(d_model): the same
    ],
    ids=["gpt", "bert", "llama", "llama wide", "transformer", "t5", "t5_v1_0"],
)
def test_first_loss(name, words, std):
    words = SIZES | {"vocab_size": VOCAB} | words
    expected = math.log(VOCAB) + words["d_model"] * std**2 / 2
    assert first_loss(fresh(name, **words), VOCAB) == pytest.approx(expected, abs=0.05)
