"""In every precision: float32 where a narrower number would not do, loss scaling for fp16, and nothing replaced."""

import csv
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import nn
from torch.nn import functional as F

import lmzoo
from lmzoo import parts
from lmzoo.blocks.head import Pooler
from lmzoo.blocks.loss import cross_entropy
from lmzoo.blocks.position import Alibi, Buckets, Rotary, Sinusoidal
from marks import slow_but
from models import ids, logits, make

FAMILIES = [("gpt", "clm"), ("bert", "mlm"), ("t5", "span_corruption")]
PLACE = {"d_model": 16, "n_heads": 3, "d_head": 16, "max_len": 600, "causal": True}  # three heads: uneven ALiBi slopes


@pytest.fixture
def bf16_true():
    """What Lightning makes of a net and of its surroundings under bf16-true: its default dtype is bfloat16 too."""
    with HalfPrecision("bf16-true").forward_context():
        yield
    assert torch.get_default_dtype() == torch.float32


def wide(make_position):
    """A scheme as it is in fp32, made outside of bf16-true."""
    torch.manual_seed(0)
    return make_position(**PLACE)


# --- positions


@pytest.mark.parametrize("scaling", [1.0, 2.0])
def test_rotary_angles_are_fp32(bf16_true, scaling):
    """BEHAVIOUR 19: positions 256 and 257 differ, and each is what float64 says."""
    cos, sin = Rotary(**PLACE, scaling=scaling).turn(torch.arange(600)[None])
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = torch.arange(600, dtype=torch.float64)[:, None] / scaling * frequencies
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0, 0].double(), angles.cos().repeat(1, 2), rtol=0, atol=1e-4)
    both = torch.cat([-angles.sin(), angles.sin()], 1)
    torch.testing.assert_close(sin[0, 0].double(), both, rtol=0, atol=1e-4)
    assert (cos[0, 0, 256] - cos[0, 0, 257]).abs().max() > 0.1


def test_rotated_queries_are_rounded_once(bf16_true):
    q = torch.randn(1, 2, 600, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    positions, scheme = torch.arange(600)[None], Rotary(**PLACE)
    narrow = scheme.rotate(q.bfloat16(), q.bfloat16(), scheme.turn(positions))[0]
    exact = scheme.apply_turn(q.bfloat16().float(), *scheme.turn(positions))
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, exact.bfloat16())


def test_sinusoids_are_rounded_once(bf16_true):
    zeros, positions = torch.zeros(1, 600, 16), torch.arange(600)[None]
    narrow = Sinusoidal(**PLACE).embed(zeros, positions)
    exact = Sinusoidal(**PLACE).embed(zeros.float(), positions)
    assert zeros.dtype == torch.bfloat16 and torch.equal(narrow, exact.bfloat16())
    assert not torch.equal(narrow[0, 256], narrow[0, 257])


@pytest.mark.parametrize("scheme", [Alibi, Buckets])
def test_biases_are_fp32(scheme):
    """ALiBi's slopes and distances are exact; of T5's table nothing is lost but its own rounding."""
    positions, reference = torch.arange(600)[None], wide(scheme)
    expected = reference.bfloat16().float().bias(positions, positions)
    with HalfPrecision("bf16-true").forward_context():
        found = reference.bfloat16().bias(positions, positions)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


# --- statistics: sums of many numbers


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_gather_their_statistics_in_fp32(norm, dtype):
    """4096 numbers far from 0, whose squares no narrow sum holds: what comes out is the exact result, rounded once."""
    x = 100 + torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    layer = norm(4096, eps=1e-6)
    exact = layer(x.to(dtype).double().to(torch.float32))
    found = layer.to(dtype)(x.to(dtype)).float()
    torch.testing.assert_close(found, exact, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_is_summed_in_fp32(dtype):
    """Of 4096 weights of about 1/4096 each: in bfloat16 a sum of ones would stop at 256."""
    scores = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(scores.softmax(-1), scores.double().softmax(-1).to(dtype), rtol=2e-2, atol=1e-7)
    assert scores.softmax(-1).double().sum(-1).sub(1).abs().max() < 0.01


@pytest.mark.parametrize("backend", ["sdpa", "matmul"])
def test_attention_over_many_equal_keys_is_their_mean(backend, bf16_true):
    net = make("gpt", attention={"_target_": "lmzoo.blocks.attention.Attention", "_partial_": True, "backend": backend})
    q, k = torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1024, 4)
    out = net.blocks[0].attn.attend(q, k, torch.ones(1, 4, 1024, 4), None, False)
    torch.testing.assert_close(out.float(), torch.ones(1, 4, 1, 4).float(), rtol=0, atol=0.01)


def test_the_loss_is_fp32_under_bf16_true(bf16_true):
    """4000 targets of about 3.7 nats: the sum is right to 1e-5, where bfloat16 holds two digits."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(4000, 16), torch.randint(40, (4000,))
    head = nn.Linear(16, 40)
    sums = cross_entropy(head, hidden, labels)
    exact = F.cross_entropy(head(hidden).double(), labels, reduction="sum")
    assert hidden.dtype == torch.bfloat16 and sums["loss"].dtype == torch.float32
    assert sums["loss"].item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "alibi", "t5"])
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_a_bf16_net_is_the_fp32_net_of_the_same_weights(name, position):
    """To bfloat16's three digits, over a row of 300."""
    net, rows = make(name, position=position, max_len=300), ids(2, 300)
    exact = logits(net.bfloat16().float(), rows)
    with HalfPrecision("bf16-true").forward_context():
        found = logits(net.bfloat16(), rows).float()
    assert (found - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_a_row_is_pooled_by_fp32_columns(bf16_true, pool):
    """Without a mask; in bfloat16 the columns 255 to 258 of a row would be one, and 601 ones 600."""
    hidden = torch.randn(2, 601, 16, generator=torch.Generator().manual_seed(0))
    pooled = Pooler(SimpleNamespace(d_model=16), pool=pool).pooled(hidden, None)
    exact = hidden[:, -1].float() if pool == "last" else hidden.float().mean(1)
    torch.testing.assert_close(pooled.float(), exact, rtol=4e-3, atol=1e-6)


# --- words


def fitted(words, folder, *more):
    """(rows of metrics.csv, validation loss) of a run of seconds on the CPU."""
    lmzoo.fit(lmzoo.compose(*words(folder, "trainer.accelerator=cpu", *more)))
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / "result.json").read_text())["val/loss"]


@pytest.mark.parametrize("word", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_what_was_asked_for_is_what_is_run(words, tmp_path, word):
    config = parts.settled(lmzoo.compose(*words(tmp_path / "run", "model=gpt", "task=clm", "trainer.accelerator=cpu",
                                               f"trainer.precision={word}")))  # fmt: skip
    trainer = parts.build_trainer(config, steps=1)
    assert trainer.precision == word
    assert (trainer.precision_plugin.__dict__.get("scaler") is not None) is (word == "16-mixed")


@pytest.mark.parametrize(("model", "task"), slow_but([("gpt", "clm")], FAMILIES))
def test_fp16_is_really_run_on_a_cpu(words, tmp_path, model, task):
    """Its losses are those of fp32 to fp16's digits; scale and skipped steps are in the rows."""
    net = (f"model={model}", f"task={task}", *(["tokenizer.vocab_size=500"] if model == "t5" else []))
    wide, _ = fitted(words, tmp_path / "wide", *net)
    half, _ = fitted(words, tmp_path / "half", *net, "trainer.precision=16-mixed")
    for one, other in zip(wide, half, strict=True):
        assert float(other["train/loss"]) == pytest.approx(float(one["train/loss"]), rel=5e-3)
        assert float(other["skipped"]) == 0 and float(other["loss_scale"]) == 65536
    assert [row["train/loss"] for row in wide] != [row["train/loss"] for row in half]
    assert "loss_scale" not in wide[0]


def test_a_skipped_step_moves_the_scale_and_not_the_schedule(words, tmp_path, monkeypatch):
    """A first scale that overflows: it halves until the gradients fit, and the learning rate waits."""
    scaler = functools.partial(torch.amp.GradScaler, "cpu", init_scale=2.0**40)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler())
    with pytest.warns(UserWarning, match="step 1 was skipped: a gradient overflowed"):
        rows, _ = fitted(words, tmp_path / "run", "model=gpt", "task=clm", "trainer.precision=16-mixed")
    assert [float(row["skipped"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row["loss_scale"]) for row in rows] == [2.0**n for n in (39, 38, 37, 36, 35, 34)]
    assert len({row["lr"] for row in rows}) == 1


@pytest.mark.slow
def test_bf16_true_says_what_it_loses(words, tmp_path):
    with pytest.warns(UserWarning, match="where updates below 1/256 of a weight are lost"):
        fitted(words, tmp_path / "run", "model=gpt", "task=clm", "trainer.precision=bf16-true")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), FAMILIES)
def test_bf16_mixed_stays_within_one_percent_of_fp32(tmp_path, model, task):
    """Validation loss and the last losses, after 200 steps of the default tiny net on the default corpus."""
    losses = {}
    for word in ("32-true", "bf16-mixed"):
        folder = tmp_path / word
        lmzoo.fit(lmzoo.compose(
            f"model={model}", f"task={task}", f"run_dir={folder}", "trainer.accelerator=cpu",
            f"trainer.precision={word}", "trainer.max_steps=200", "trainer.val_every_n_steps=200",
            "trainer.log_every_n_steps=100", "logger.wandb.mode=disabled",
        ))  # fmt: skip
        with open(folder / "metrics.csv", newline="") as file:
            last = list(csv.DictReader(file))[-1]
        losses[word] = [float(last["train/loss"]), float(last["val/loss"])]
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=0.01)
    assert losses["bf16-mixed"] != losses["32-true"]


@pytest.mark.parametrize("call", [
    'memory.passes(config, 1, 4, torch.bfloat16)',
    'parts.quiet(), torch.autocast("cpu", torch.bfloat16).__enter__(), lmzoo.build(config)(torch.zeros(1, 4).long())',
])  # fmt: skip
def test_torch_says_nothing_of_norms_in_float32(call):
    """Where it would warn, once a process, that its fused kernel takes no weights of another type than the input's."""
    code = f"""
import lmzoo, torch
from lmzoo import memory, parts
from models import config
norm = {{"_target_": "torch.nn.RMSNorm", "_partial_": True}}
config = config("gpt")
config["attention"] |= {{"qk_norm": norm}}
{call}
"""
    command = [sys.executable, "-W", "error:Mismatch dtype", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("model", "task"), slow_but([("gpt", "clm")], FAMILIES))
def test_adafactor_learns_in_fp16(words, tmp_path, model, task):
    """Its moments are products of very small numbers, which autocast would take in fp16: all weights were NaN then."""
    rows, _ = fitted(words, tmp_path, f"model={model}", f"task={task}", "optim=adafactor", "trainer.precision=16-mixed")
    assert float(rows[-1]["train/loss"]) < float(rows[0]["train/loss"])
