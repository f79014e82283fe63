"""What training is said to take of memory against what torch's allocator counts, and the arithmetic of each engine."""

import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import models
from lmzoo import engines, memory, optim
from lmzoo.blocks.loss import cross_entropy

ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "optimizer": partial(torch.optim.AdamW)}
SIZES = {
    "gpt": {"d_model": 64, "n_heads": 4, "d_ff": 256, "n_layers": 4, "max_len": 64, "dropout": 0.1, "vocab_size": 500},
    "llama": {"d_model": 128, "n_heads": 4, "d_ff": 344, "n_layers": 6, "max_len": 48, "vocab_size": 1000},
}


def measured(name: str, rows: int, recompute: bool) -> int:
    """The most bytes that torch's allocator has handed out at a time in two steps of two micro-batches."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        net = models.make(name, **SIZES[name]).train()
        if recompute:
            engines.recompute_blocks(net)
        optimizer = optim.build(net, ADAMW)
        ids = models.ids(rows, net.max_len, vocab_size=net.vocab_size)

        def readout(head, hidden):
            return cross_entropy(head, hidden.flatten(0, 1), ids.flatten())

        for _ in range(2):
            for _ in range(2):
                net(ids, readout=readout)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, n_bytes in changes:
        held += n_bytes
        most = max(most, held)
    return most


def planned(name: str, rows: int, engine: str = "one device", recompute: bool = False, devices: int = 1, **more):
    config = models.config(name, **SIZES[name])
    with torch.device("meta"):
        net = memory.checkpoint.build(config)
    kept = memory.passes(config, rows, net.max_len)
    return memory.memory(net, kept, memory.moments(net, ADAMW), engine, devices, recompute, accumulates=True, **more)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_is_within_a_tenth_of_what_is_measured(name, recompute):
    assert planned(name, 6, recompute=recompute).total == pytest.approx(measured(name, 6, recompute), rel=0.1)


def test_activations_grow_with_the_rows_and_states_do_not():
    two, four = planned("gpt", 2), planned("gpt", 4)
    assert (two.weights, two.gradients, two.optimizer) == (four.weights, four.gradients, four.optimizer)
    assert four.activations == pytest.approx(2 * two.activations, rel=0.02)


def test_each_engine_by_hand():
    """GPT in float32: 12 d^2 + 13 d a block, V d + T d + 2 d outside; AdamW keeps two of each, and a step a tensor."""
    d, n_blocks = 64, 4
    block = 12 * d * d + 13 * d
    root = 500 * d + 64 * d + 2 * d
    n = 4 * (n_blocks * block + root)
    tensors = 16 * n_blocks + 4
    one, ddp, fsdp = (planned("gpt", 2, engine, devices=4) for engine in ("one device", "ddp", "fsdp"))
    assert (one.weights, one.gradients, one.optimizer) == (n, n, 2 * n + 4 * tensors)
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (n, 2 * n, one.optimizer)
    assert (fsdp.weights, fsdp.optimizer) == (n / 4 + 4 * (root + 2 * block), one.optimizer / 4)
    assert fsdp.gradients == n / 4 + n
    half = planned("gpt", 2, "fsdp", devices=4, dtype=torch.bfloat16)
    assert half.weights == n / 4 + 2 * (root + 2 * block)


def test_a_gpus_attention_keeps_no_scores():
    """Of 4 heads, 64 x 64 scores a row and layer, of which at least one matrix goes."""
    config = models.config("gpt", **SIZES["gpt"])
    ours, theirs = (memory.passes(config, 2, 64, fused=fused) for fused in (False, True))
    assert ours.blocks - theirs.blocks >= 4 * 2 * 4 * 64 * 64 * 4 and ours.outside == theirs.outside


def test_an_optimizer_that_looks_at_its_weights_is_counted_too():
    """Adafactor keeps a number for each row and column of a matrix, one for each of a vector's, and a step a tensor."""
    with torch.device("meta"):
        net = memory.checkpoint.build(models.config("gpt", **SIZES["gpt"]))
    shapes = [weight.shape for weight in net.parameters()]
    assert memory.moments(net, ADAMW | {"optimizer": torch.optim.Adafactor}) == 4 * sum(sum(s) + 1 for s in shapes)


def test_targets_and_the_decoder_s_length_count():
    """Of logits only the targets' are there; two blocks of T5's four are the decoder's, and so is its head."""
    t5, bert = models.config("t5", n_layers=2), models.config("bert", vocab_size=30)
    even, short = memory.passes(t5, 2, 8), memory.passes(t5, 2, 8, decoder_length=4)
    assert short.inputs == 4 * 2 * 16 * (2 * 8 + 2 * 4) and short.head == even.head / 2
    assert even.blocks / 2 < short.blocks < even.blocks
    assert memory.passes(bert, 2, 8, targets=3).head == memory.HEAD * 4 * 3 * 30


def test_the_root_and_the_blocks_are_all():
    kept = memory.passes(models.config("t5", n_layers=2), 2, 8)
    assert kept.n_blocks == 4 and kept.inputs == 4 * 2 * 8 * 16 * 4
    assert kept.bytes(True) < kept.bytes(False) and math.isfinite(kept.bytes(True))
