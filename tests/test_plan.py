"""Counts against the papers' and against torch's own counter; what is measured leaves no trace."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lmzoo
from lmzoo import UserError, memory
from lmzoo import plan as planning
from lmzoo.memory import Memory
from lmzoo.optim import freeze
from lmzoo.plan import Plan, count_flops, count_parameters, count_steps, find_peak, measure, part_of, plan
from models import config, make

GPT2 = {"d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072, "max_len": 1024}
WORDS = {"max_steps": None, "max_tokens": None, "max_epochs": None}


class Data:
    """Rows of eight tokens, four to a micro-batch, sixteen to a step; 1,000 in the corpus, 30 for validation."""

    tokens_per_step, steps_per_epoch, lost, undecided = 128, 63, (30, 20, 8000), False

    def __init__(self, **more):
        ids = torch.arange(32).reshape(4, 8)
        self.batch = {"input_ids": ids, "labels": ids, "micro": 0} | more

    def rows_read(self, steps: int) -> int:
        return steps // 63 * 1000 + min(steps % 63 * 16, 1000)

    def tokens_read(self, steps: int) -> int:
        return 8 * self.rows_read(steps)

    def sources(self, first_step: int, steps: int) -> dict:
        return {"code": (4 * (steps - first_step), 250), "wiki": (12 * (steps - first_step), 750)}

    def train_dataloader(self):
        return [[self.batch, self.batch]]

    def n_rows(self, split: str) -> int:
        return {"train": 1000, "val": 30}[split]

    def n_tokens(self, split: str) -> int:
        return 8 * self.n_rows(split)


def run(**words) -> dict:
    trainer = WORDS | {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": "32-true"}
    trainer |= {"val_every_n_steps": None, "limit_val_batches": None, "strategy": "auto"}
    trainer |= {"activation_checkpointing": "none"}
    adamw = {"lr": 1e-3, "weight_decay": 0.1, "optimizer": torch.optim.AdamW}
    return {"trainer": trainer | words, "data": {"batch_size": 16, "packing": "stream"}, "optim": adamw,
            "model": config("gpt"), "trust": ()}  # fmt: skip


def task(net, steps: int = 1) -> SimpleNamespace:
    """What a plan asks of a task."""
    def loss(batch):
        read = [name for name in ("input_ids", "decoder_input_ids") if name in batch]
        return {"loss": net(**{name: batch[name] for name in read}).logsumexp(-1).sum()}

    return SimpleNamespace(net=net, total_steps=steps, loss=loss)


def planned(given: dict, data: Data | None = None, net=None, first_step: int = 0) -> Plan:
    """The plan of a run as long as the trainer's words say."""
    data = data or Data()
    return plan(task(net or make("gpt"), count_steps(given["trainer"], data)), given, data, first_step)


@pytest.mark.parametrize(
    "name, part",
    [
        ("embed.tokens.weight", "embed"),
        ("embed.project.bias", "embed"),
        ("embed.norm.weight", "norms"),
        ("positions.0.table.weight", "position"),
        ("encoder.positions.0.table.weight", "position"),
        ("blocks.3.attn.q.weight", "attention"),
        ("blocks.3.attn.q_norm.weight", "norms"),
        ("blocks.3.attn_norm.weight", "norms"),
        ("decoder.blocks.0.cross.k.weight", "cross"),
        ("decoder.blocks.0.cross_norm.weight", "norms"),
        ("blocks.3.ffn.gate.weight", "ffn"),
        ("norm.bias", "norms"),
        ("head.dense.weight", "head"),
        ("head.norm.weight", "norms"),
        ("temperature", "other"),
    ],
)
def test_a_parameter_belongs_to_the_part_in_its_name(name, part):
    assert part_of(name) == part


def test_gpt2_by_parts_as_its_shapes_give_them():
    with torch.device("meta"):
        net = lmzoo.build(config("gpt", vocab_size=50257, **GPT2))
    assert count_parameters(net) == {
        "embed": 50257 * 768,
        "position": 1024 * 768,
        "attention": 12 * 4 * (768 * 768 + 768),
        "ffn": 12 * (2 * 768 * 3072 + 3072 + 768),
        "norms": 25 * 2 * 768,
        "head": 0,
    }
    assert sum(count_parameters(net).values()) == 124_439_808
    # 6 x (the layers' matrices and the tied head's) + 12 layers x 12 x 768 x 1024 for attention
    assert count_flops(net, 1, 1, 1024) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5", "transformer"])
def test_flops_are_those_that_torch_counts(name):
    """All positions are targets, full rows, and attention by plain matrix products, which torch's counter sees."""
    net = make(name).train()
    for module in net.modules():
        if hasattr(module, "backend"):
            module.backend = "matmul"
    ids = torch.randint(50, (3, 10))
    decoder = torch.randint(50, (3, 6))
    double = net.family == "encoder-decoder"
    inputs = {"input_ids": ids} | ({"decoder_input_ids": decoder} if double else {})
    with FlopCounterMode(display=False) as counter:
        net(**inputs).sum().backward()
    sizes = {"tokens": 30, "length": 10, "targets": 18 if double else 30}
    sizes |= {"decoder_tokens": 18, "decoder_length": 6} if double else {}
    assert count_flops(net, **sizes) == counter.get_total_flops()


def test_shared_layers_count_as_often_as_they_are_used_and_windows_bound_attention():
    words = {"head": "untied", "d_ff": 16, "d_model": 16, "n_heads": 4}
    layers = {
        k: count_flops(make("gpt", n_layers=n, share=s, **words), 1, 0, 32) for k, n, s in (("4", 4, 1), ("4/4", 4, 4))
    }
    assert layers["4"] == layers["4/4"] == 4 * (6 * 6 * 16 * 16 + 12 * 16 * 32)
    narrow = make("gpt", n_layers=1, **words)
    narrow.blocks[0].attn.window = 8
    assert count_flops(narrow, 1, 0, 32) == 6 * 6 * 16 * 16 + 12 * 16 * 8


def example(**changes) -> Plan:
    values = {
        "parameters": {"embed": 10, "head": 0}, "corpus": {"train": (1000, 10)}, "rows_per_step": 4,
        "tokens_per_step": 32, "first_step": 0, "steps": 10, "epochs": 1.0, "tokens": 320, "flops_per_token": 6e9,
        "peak": 300e12, "peak_source": "data sheet", "device": "8 x NVIDIA A100", "seconds": 100.0,
        "memory": Memory(40, 40, 80, 40), "lost": (30, 20, 1000), "sources": {},
        "packing": "stream", "groups": (("decay", 10, 1.0),),
    }  # fmt: skip
    return Plan(**values | changes)


def test_what_is_lost_and_what_each_source_gives():
    table = example(sources={"code": (300, 400), "wiki": (100, 1600)}).table().splitlines()
    assert [row.split() for row in table if row.startswith(("lost", "source"))] == [
        "lost 5.00% of tokens: 30 cut, 20 padding".split(),
        "source code 300 rows, 75.0% of the run = 0.75 epochs of 400".split(),
        "source wiki 100 rows, 25.0% of the run = 0.06 epochs of 1,600".split()]
    assert max(map(len, table)) <= 100


def test_mfu_is_over_the_peak_of_all_devices_or_unknown():
    # 8 devices, 200,000 tokens/s of 6 GFLOP each are 1.2 PFLOP/s out of 2.4
    assert example().mfu(200_000, devices=8) == pytest.approx(0.5)
    assert example(peak=None).mfu(200_000, devices=8) is None
    assert "peak unknown, so no MFU" in example(peak=None, peak_source="unknown").table()


@pytest.mark.parametrize(
    "name, half, single",
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40", None, None),
        ("NVIDIA GH200 480GB", None, None),
    ],
)
def test_a_gpus_peak_is_its_own_or_unknown(monkeypatch, name, half, single):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak(torch.device("cuda"), torch.bfloat16)[0] == half
    assert find_peak(torch.device("cuda"), torch.float32)[0] == single


def test_a_cpus_peak_is_measured_and_other_devices_are_unknown():
    peak, source = find_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15 and source == "measured"
    assert find_peak(torch.device("meta"), torch.float32) == (None, "unknown")


def test_the_table_has_100_columns_even_for_the_largest():
    large = example(
        parameters={"embed": 617_000_000_000, "cross": 1_000_000_000_000, "head": 0},
        tokens_per_step=3_200_000, tokens=32 * 10**11,
        corpus={"train": (10**13, 10**10), "val": (10**9, 10**6)}, steps=10**6, epochs=123.4, flops_per_token=1.2e12,
        seconds=9e6, memory=Memory(1e12, 1e12, 26e12, 1e12),
    )  # fmt: skip
    for text in (large.table(), example().table(), example(seconds=None, peak=None).table()):
        assert max(map(len, text.splitlines())) <= 100
    assert "1,617,000,000,000" in large.table() and "about 104.2 days" in large.table()
    assert "about 29.0 TB" in large.table()


@pytest.mark.parametrize(
    "n_bytes, text", [(999_400_000, "999 MB"), (10**9, "1.0 GB"), (9.99e11, "999.0 GB"), (2793.7e9, "2.8 TB")]
)
def test_bytes_are_in_a_unit_that_fits(n_bytes, text):
    assert planning.size(n_bytes) == text


@pytest.mark.parametrize(
    "seconds, text", [(3, "3 s"), (89, "89 s"), (120, "2.0 min"), (5400, "1.5 h"), (3e5, "3.5 days")]
)
def test_durations_are_in_a_unit_that_fits(seconds, text):
    assert planning.duration(seconds) == text


def test_the_shortest_of_the_bounds_is_the_runs_length():
    assert count_steps(WORDS | {"max_steps": 10}, Data()) == 10
    assert count_steps(WORDS | {"max_tokens": 1281}, Data()) == 11  # 10 steps are 1280 tokens
    assert count_steps(WORDS | {"max_tokens": 8001}, Data()) == 64  # the 63rd step has 8 rows only
    assert count_steps(WORDS | {"max_epochs": 1.5}, Data()) == 95  # of 63 steps
    assert count_steps({"max_steps": 100, "max_tokens": 1281, "max_epochs": 1.5}, Data()) == 11
    assert count_steps(WORDS, Data()) == 63
    for more in ({"max_tokens": 1e18}, {"max_epochs": 1e11}):
        with pytest.raises(UserError, match=rf"trainer.{[*more][0]}=1e\+1[18] are more than 1,000,000,000,000 steps"):
            count_steps(WORDS | more, Data())
    assert count_steps(WORDS | {"max_epochs": 1e11, "max_steps": 10}, Data()) == 10


def test_a_plan_has_the_sizes_of_the_run():
    made = planned(run(max_steps=126))
    assert (made.steps, made.epochs, made.rows_per_step, made.tokens_per_step) == (126, 2.0, 16, 128)
    assert made.tokens == 16_000  # two epochs of 1,000 rows, not 126 steps of 16
    assert made.corpus == {"train": (8000, 1000), "val": (240, 30)}
    assert made.flops_per_token == count_flops(make("gpt"), 32, 32, 8) / 32
    assert made.seconds > 0


@pytest.mark.parametrize("engine, devices", [("auto", 1), ("ddp", 2), ("fsdp", 4)])
@pytest.mark.parametrize("recompute", memory.RECOMPUTE)
def test_memory_is_that_of_the_run_s_engine_and_optimizer(engine, devices, recompute):
    """Four rows of eight at a time, which one and two devices have to accumulate."""
    given = run(strategy=engine, devices=devices, activation_checkpointing=recompute)
    given["optim"]["optimizer"] = partial(torch.optim.SGD, momentum=0.9)
    made = planned(given)
    with torch.device("meta"):
        net = lmzoo.build(config("gpt"))
    n, kept = 4 * sum(w.numel() for w in net.parameters()), memory.passes(config("gpt"), 4, 8, recompute=recompute)
    name = {"auto": "one device"}.get(engine, engine)
    assert made.memory == memory.memory(net, kept, n, name, devices, accumulates=devices < 4)
    assert made.table().splitlines()[-1].endswith(" each") == (devices > 1)


def test_memory_of_weights_in_half_precision_and_of_frozen_ones():
    given = run(precision="bf16-true")
    given["optim"] |= {"freeze": ["embed*"], "optimizer": torch.optim.SGD}
    found, n = planned(given).memory, sum(w.numel() for w in make("gpt").parameters())
    assert (found.weights, found.optimizer) == (2 * n, 0)
    assert found.gradients == 2 * (n - make("gpt").embed.tokens.weight.numel())
    whole = memory.passes(config("gpt"), 4, 8)
    half = memory.passes(config("gpt"), 4, 8, torch.bfloat16, mixed=False, ready=lambda net: freeze(net, ["embed*"]))
    assert found.activations == half.bytes() and half.blocks < 0.6 * whole.blocks


def test_memory_is_unknown_until_the_rows_are_settled_and_where_a_part_looks_into_its_tensors(monkeypatch):
    data = Data()
    data.undecided = True
    assert planned(run(), data).memory is None
    monkeypatch.setattr("lmzoo.blocks.ffn.FeedForward.forward", lambda self, x: x * x.sum().item())
    found = planned(run())
    assert found.memory is None and re.search(r"^memory +unknown$", found.table(), re.MULTILINE)


def test_a_resumed_run_has_the_sizes_of_what_is_left(monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *_: 2.0)  # seconds for a micro-batch of 4 rows
    made = planned(run(val_every_n_steps=30, max_steps=126), first_step=61)
    # of epoch one steps 62 (16 rows) and 63 (8), then the 1,000 of epoch two
    assert (made.first_step, made.steps, made.tokens) == (61, 126, 8 * 1024)
    assert made.seconds == pytest.approx((1024 + 3 * 30 / 3) * 0.5)  # validated after 90, 120 and the last
    assert re.search(r"left to run +65  steps = 1\.03 epochs = 8,192 tokens", made.table())


def test_time_is_rows_over_the_measured_rate_with_validation_at_a_third(monkeypatch):
    monkeypatch.setattr(planning, "measure", lambda *_: 2.0)  # seconds for a micro-batch of 4 rows
    assert planned(run(max_steps=9)).seconds == pytest.approx(9 * 16 * 0.5 + 30 * 0.5 / 3)
    validated = planned(run(max_steps=9, val_every_n_steps=4))
    assert validated.seconds == pytest.approx(9 * 16 * 0.5 + 3 * 30 * 0.5 / 3)  # after 4, 8 and the last
    part = planned(run(max_steps=9, val_every_n_steps=4, limit_val_batches=1))
    assert part.seconds == pytest.approx(9 * 16 * 0.5 + 3 * 16 * 0.5 / 3)


def test_what_is_too_long_to_measure_is_worked_out_from_the_peak(monkeypatch):
    monkeypatch.setattr(planning, "find_peak", lambda *_: (1e3, "measured"))
    monkeypatch.setattr(planning, "measure", None)
    made = planned(run(max_steps=9))
    assert made.seconds == pytest.approx(made.flops_per_token * 8 * (16 * 9 + 30 / 3) / 0.4e3)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_measuring_leaves_weights_gradients_and_random_numbers_alone(name):
    net = make(name).train()
    more = {"decoder_input_ids": torch.ones(4, 3, dtype=torch.long)} if name == "t5" else {}
    batch = Data(**more).batch
    before, torch_state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    assert measure(task(net), batch, torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_measuring_runs_the_tasks_own_loss():
    net = torch.nn.Linear(10, 10)
    seen = []

    def loss(batch):
        seen.append(batch)
        return {"loss": net(batch["x"]).square().sum()}

    x = torch.ones(6, 10)
    measure(SimpleNamespace(net=net, loss=loss), {"x": x}, torch.float32)
    assert len(seen) > 1 and seen[0]["x"] is x


def trained_line(net, **words) -> list[str]:
    settings = run()
    settings["optim"] |= words
    found = planned(settings, net=net).table().splitlines()
    return [re.sub(" +", " ", line) for line in found if line.startswith("trained")]


def test_the_optimizer_s_groups_are_told_where_they_are_not_the_plain_two():
    net = make("gpt", vocab_size=50)
    assert trained_line(net) == []
    muon = {"_target_": "lmzoo.optim.MuonAdamW", "_partial_": True}
    matrices = 2 * (4 * 16 * 16 + 2 * 16 * 24)
    tables, vectors = 50 * 16 + 32 * 16, 2 * (4 * 16 + 24 + 16 + 2 * 2 * 16) + 2 * 16
    total = matrices + tables + vectors
    assert trained_line(net, optimizer=muon) == [
        f"trained {total:,} muon_decay {matrices:,}, decay {tables:,}, no_decay {vectors:,}"
    ]
    assert trained_line(net, layer_decay=0.5) == [f"trained {total:,} in 6 groups, learning rate x 0.125 to x 1"]
    net.embed.requires_grad_(False)
    assert trained_line(net) == [f"trained {total - 800:,} decay {matrices + tables - 800:,}, no_decay {vectors:,}"]
