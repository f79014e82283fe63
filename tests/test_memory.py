"""What training is said to take of memory against what torch's allocator counts, and the arithmetic of each engine.

Run as a script this file is one of two gloo ranks: it trains with each engine and saves by how much the process grew,
which is what a plan says where malloc gives back all that is freed.
"""

import gc
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import models
import ranks
from lmzoo import engines, memory, optim
from lmzoo.blocks.loss import cross_entropy

HIGHEST = Path("/proc/self/clear_refs")  # 5 written to it: the most memory starts anew
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "optimizer": partial(torch.optim.AdamW)}
WIDE = {"n_heads": 2, "max_len": 32, "vocab_size": 2048, "dropout": 0.1}
SIZES = {
    "gpt": {"d_model": 64, "n_heads": 4, "d_ff": 256, "n_layers": 4, "max_len": 64, "dropout": 0.1, "vocab_size": 500},
    "llama": {"d_model": 128, "n_heads": 4, "d_ff": 344, "n_layers": 6, "max_len": 48, "vocab_size": 1000},
    "default": {"d_model": 128, "n_heads": 4, "d_ff": 512, "n_layers": 2, "max_len": 64, "vocab_size": 2048},
    "small": WIDE | {"d_model": 32, "d_ff": 128, "n_layers": 2},
    "bert": WIDE | {"d_model": 64, "d_ff": 256, "n_layers": 3},
    "t5": WIDE | {"d_model": 48, "d_ff": 96, "n_layers": 2},
}
LARGE = {
    "deep": {"d_model": 256, "n_heads": 4, "d_ff": 1024, "n_layers": 10, "max_len": 64, "vocab_size": 1024},
    "many": {"d_model": 256, "n_heads": 4, "d_ff": 688, "n_layers": 8, "max_len": 64, "vocab_size": 4096},
}
KIND = {"default": "gpt", "small": "gpt", "deep": "gpt", "many": "llama"}
SPREAD = [(name, engine, accumulates) for name in LARGE for engine in ("ddp", "fsdp")
          for accumulates in (True, False)]  # fmt: skip


def measured(name: str, rows: int, recompute: str = "none", accumulates: bool = True, targets: int | None = None):
    """The most bytes that torch's allocator has handed out at a time in two steps, of two micro-batches or of one."""
    gc.collect()  # what earlier nets have left would be freed while this one is counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        net = models.make(KIND.get(name, name), **SIZES[name]).train()
        engines.recompute_blocks(net, recompute)
        train(net, net, rows, accumulates, targets)
    return highest(record)


def train(net, called, rows: int, accumulates: bool, targets: int | None = None, n_steps: int = 2) -> None:
    """Steps of `net` as lmzoo takes them; `called`: the net, or what wraps it."""
    optimizer = optim.build(net, ADAMW)
    ids = models.ids(rows, net.max_len, vocab_size=net.vocab_size)
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if net.family == "encoder-decoder" else {})
    labels = ids.flatten().clone()
    labels[targets or len(labels) :] = -100

    def readout(head, hidden):
        return cross_entropy(head, hidden.flatten(0, 1), labels)

    for _ in range(n_steps):
        optimizer.zero_grad()
        for last in (False, True) if accumulates else (True,):
            if isinstance(net, FSDPModule):
                net.set_requires_gradient_sync(last)
            with nullcontext() if last or called is net else called.no_sync():
                called(**given, readout=readout)["loss"].backward()
        optimizer.step()


def highest(record) -> int:
    events = record.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(n_bytes for _, n_bytes in changes))


def planned(
    name: str, rows: int, engine: str = "one device", recompute: str = "none", devices: int = 1,
    accumulates: bool = True, targets: int | None = None, **more,
):  # fmt: skip
    config = models.config(KIND.get(name, name), **(SIZES | LARGE)[name])
    with torch.device("meta"):
        net = memory.checkpoint.build(config)
    kept = memory.passes(config, rows, net.max_len, targets=targets, recompute=recompute)
    return memory.memory(net, kept, memory.moments(net, ADAMW), engine, devices, accumulates, **more)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("recompute", memory.RECOMPUTE)
def test_a_plan_is_within_a_tenth_of_what_is_measured(name, recompute):
    """Each family, and GPT in four shapes: where logits weigh most, and where blocks do."""
    assert planned(name, 6, recompute=recompute).total == pytest.approx(measured(name, 6, recompute), rel=0.1)


@pytest.mark.parametrize("words", [
    {"rows": 12}, {"rows": 1}, {"rows": 6, "targets": 30}, {"rows": 1, "recompute": "full"},
    {"rows": 40, "recompute": "full"}, {"rows": 40, "recompute": "selective"},
])  # fmt: skip
def test_so_is_that_of_steps_of_one_micro_batch(words):
    """Gradients come as activations go: neither are there whole when the others are, of few rows and of many.

    Also of few targets, and of more than a chunk of them.
    """
    found = planned("default", accumulates=False, **words).total
    assert found == pytest.approx(measured("default", accumulates=False, **words), rel=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not HIGHEST.exists(), reason="only Linux says how much memory a process has had at the most")
def test_and_that_of_two_ranks(tmp_path, monkeypatch):
    """Of steps of two micro-batches and of one, where states weigh most and where what is gathered does."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 * 1024))  # larger blocks are given back once freed
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(64 * 1024))
    for grown in ranks.run(__file__, tmp_path):
        for name, engine, accumulates in SPREAD:
            plan = planned(name, 4, engine, devices=2, accumulates=accumulates).total
            assert grown[name, engine, accumulates] == pytest.approx(plan, rel=0.1), (name, engine, accumulates)


def test_activations_grow_with_the_rows_and_states_do_not():
    two, four = planned("gpt", 2), planned("gpt", 4)
    assert (two.weights, two.gradients, two.optimizer) == (four.weights, four.gradients, four.optimizer)
    assert four.activations == pytest.approx(2 * two.activations, rel=0.05)  # the head's gradient is of one size


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
    assert fsdp.gradients == n  # whole until they are sent
    at_once = planned("gpt", 2, "fsdp", devices=4, accumulates=False)
    assert at_once.gradients == n / 4 + 4 * (root + 2 * block) and at_once.total < fsdp.total
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
    t5, bert = models.config("t5", n_layers=2), models.config("bert", vocab_size=3000)
    even, short = memory.passes(t5, 2, 8), memory.passes(t5, 2, 8, decoder_length=4)
    assert even.blocks / 2 < short.blocks < even.blocks
    few, more = (memory.passes(bert, 2, 8, targets=n) for n in (3, 13))
    assert more.head - few.head == pytest.approx(10 * 2 * 4 * 3000, rel=0.05)  # logits, and their gradient


def test_recomputed_blocks_keep_their_inputs_and_selective_ones_their_products_too():
    """GPT's products are 3 d of queries, keys and values, d of attention, its output, 4 d and d of the feed-forward."""
    d, tokens, n_blocks = 64, 2 * 64, 4
    config = models.config("gpt", **SIZES["gpt"] | {"dropout": 0.0})
    none, selective, full = (memory.passes(config, 2, 64, recompute=how) for how in memory.RECOMPUTE)
    assert full.blocks == n_blocks * 4 * tokens * d
    statistics = 4 * tokens * 4  # of the fused kernel: a number for each query and head
    assert selective.blocks == full.blocks + n_blocks * (4 * tokens * (3 + 1 + 1 + 4 + 1) * d + statistics)
    assert selective.blocks < 0.7 * none.blocks


def resident(key: str) -> int:
    """Bytes of memory that this process has (VmRSS), or has had at the most since HIGHEST was written to (VmHWM)."""
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return 1024 * int(line.split()[1])


def growth(name: str, engine: str, accumulates: bool) -> int:
    """By how many bytes this process grows at the most while its rank trains."""
    gc.collect()
    HIGHEST.write_text("5")
    before = resident("VmRSS")
    net = models.make(KIND.get(name, name), **(SIZES | LARGE)[name]).train()
    if engine == "fsdp":
        for part in (*engines.blocks(net), net):
            fully_shard(part)
    called = net if engine == "fsdp" else DistributedDataParallel(net)
    train(net, called, 4, accumulates, n_steps=3)  # DDP makes new buckets at the second, and fills them at the third
    return resident("VmHWM") - before


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=ranks.rank())
    for engine in ("ddp", "fsdp"):
        growth("small", engine, accumulates=True)  # what is made once, at a first run
    ranks.save({case: growth(*case) for case in SPREAD})
