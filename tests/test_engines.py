"""A run spread by FSDP2 is the run of one process: losses, weights, checkpoints, whichever goes on from which.

Run as a script this file is one of two gloo ranks: it trains what `scenarios` lists and saves what came of it.
"""

import platform
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from lmzoo.tasks.base import Task
from lmzoo.tasks.span_corruption import SpanCorruption
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import models
import ranks
from lmzoo import checkpoint, engines, optim
from lmzoo.callbacks import AtomicIO
from small_steps import newton_schulz_in_fp32

FAMILIES = ("gpt", "bert", "t5")
# keys' biases have no gradient but rounding's, which AdamW would make into steps of full length without an eps
ADAMW = {"lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.1, "optimizer": partial(torch.optim.AdamW, eps=1e-3)}
OPTIMIZERS = {
    "muon": ADAMW | {"optimizer": partial(optim.MuonAdamW, eps=1e-3)},
    "adafactor": ADAMW | {"optimizer": partial(optim.Adafactor, eps=(1e-3, 1e-3))},
}
N_STEPS, HALF = 4, 2


def task(name, settings=ADAMW, recompute="none", **words):
    net = models.make(name, dropout=0.1, **words).train()
    engines.recompute_blocks(net, recompute)
    kind = object.__new__(SpanCorruption if net.family == "encoder-decoder" else Task)
    Task.__init__(kind, net, None, settings, lambda step, total: 1 / (1 + step))
    kind.identity = {"config": {"model": net.config}}
    return kind


def windows(name, first=0, rank=0, world=1):
    """From step `first` on, four micro-batches a step, of which the last is a filler."""
    steps = []
    for step in range(N_STEPS):
        micros = []
        for number in range(4):
            ids = models.ids(2, 8, seed=10 * step + number)
            labels = torch.full_like(ids, -100) if number == 3 else models.ids(2, 8, seed=99 + number)
            labels[0, : number + 3] = -100
            more = {"decoder_input_ids": models.ids(2, 8, seed=number)} if name == "t5" else {}
            if name == "t5":
                more |= {"attention_mask": torch.ones_like(ids), "decoder_attention_mask": torch.ones_like(ids)}
            micros.append({"input_ids": ids, "labels": labels, "micro": number, **more})
        steps.append(micros[rank::world])
    return steps[first:]


def fit(task, name, rank=0, world=1, half=False, ckpt_path=None, sharded=False, start=None, **settings):
    """Train four steps, or the first or last `half` of them; returns the losses. `start` is called before the first."""
    losses = []
    noting = LambdaCallback(on_train_batch_end=lambda trainer, task, output, *_: losses.append(float(output["loss"])))
    if world > 1 and "strategy" not in settings:
        settings |= {"strategy": engines.FSDP(sharded)}
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                      use_distributed_sampler=False, accelerator="cpu", max_epochs=2 if ckpt_path else 1, devices=world,
                      callbacks=[noting, LambdaCallback(on_train_start=start)], plugins=[AtomicIO(sharded)],
                      **settings)  # fmt: skip
    rows = windows(name, HALF if ckpt_path else 0, rank, world)
    trainer.fit(task, DataLoader(rows[:HALF] if half else rows, batch_size=None), ckpt_path=ckpt_path)
    return losses


def weights(task, first=True):
    return engines.gathered(dict(task.net.state_dict()), first)


def scenarios(folder, rank):
    """What each of two ranks makes of the runs: {name: (losses, weights)}, and some facts about them."""
    spread, results, facts = {"rank": rank, "world": 2}, {}, {}

    def note(scenario, run, name, **settings):
        results[scenario] = fit(run, name, **spread, **settings), weights(run)
        return run

    for name in FAMILIES:
        run = note(name, task(name), name)
        run.trainer.save_checkpoint(folder / f"{name}.ckpt")
    facts["spread"] = all(isinstance(weight, DTensor) for weight in run.net.parameters())
    facts["groups"] = sum(isinstance(module, FSDPModule) for module in run.net.modules())
    net = engines.whole(run.net, rank == 0)
    facts["whole"] = type(net).__name__, {name: weight.detach() for name, weight in net.state_dict().items()}

    for how in ("selective", "full"):
        note(how, task("gpt", recompute=how), "gpt")
    note("share", task("gpt", share=2), "gpt")
    for name in FAMILIES:  # parameters that go unused would raise here
        sent = []

        def counted(_, bucket, sent=sent):
            sent.append(bucket.buffer().numel())
            return allreduce_hook(None, bucket)

        def listen(trainer, _, counted=counted):
            trainer.strategy.model.register_comm_hook(None, counted)

        run = note(f"ddp {name}", task(name), name, strategy=DDPStrategy(), start=listen)
        facts[f"ddp {name}"] = sum(sent) / sum(weight.numel() for weight in run.net.parameters())
    note("bf16", task("gpt"), "gpt", precision="bf16-mixed")

    for sharded, file in ((False, "half.ckpt"), (True, "folder.ckpt")):
        half = task("gpt")
        fit(half, "gpt", **spread, half=True, sharded=sharded)
        half.trainer.save_checkpoint(folder / file)
        note(f"from {file}", task("gpt"), "gpt", ckpt_path=folder / file)
    note("from plain", task("gpt"), "gpt", ckpt_path=folder / "plain.ckpt")
    for name, settings in OPTIMIZERS.items():
        note(name, task("gpt", settings), "gpt").trainer.save_checkpoint(folder / f"{name}.ckpt")
        half = task("gpt", settings)
        fit(half, "gpt", **spread, half=True, sharded=True)
        half.trainer.save_checkpoint(folder / f"half-{name}.ckpt")
        note(f"from {name}", task("gpt", settings), "gpt", ckpt_path=folder / f"half-{name}.ckpt")
    return results, facts


@pytest.fixture(scope="module", autouse=True)
def precise():
    with newton_schulz_in_fp32():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(folder, {name: (losses, weights)}) of one process, which leaves a checkpoint of half a run in the folder."""
    folder = tmp_path_factory.mktemp("ranks")
    results = {}
    settings = {name: {"settings": value} for name, value in OPTIMIZERS.items()}
    for scenario, words in {**dict.fromkeys(FAMILIES, {}), "share": {"share": 2}, **settings}.items():
        name = scenario if scenario in FAMILIES else "gpt"
        run = task(name, **words)
        results[scenario] = fit(run, name), weights(run)
        run.trainer.save_checkpoint(folder / f"one-{scenario}.ckpt")
    half = task("gpt")
    fit(half, "gpt", half=True)
    half.trainer.save_checkpoint(folder / "plain.ckpt")
    return folder, results


@pytest.fixture(scope="module")
def spread(plain):
    """What two ranks made of it: the first one's results and facts."""
    return ranks.run(__file__, plain[0])[0]


def assert_same(one, other, tolerance=1e-6):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "scenario", [*FAMILIES, "share", "selective", "full", *OPTIMIZERS, *(f"ddp {name}" for name in FAMILIES)]
)
def test_a_spread_run_is_that_of_one_process(plain, spread, scenario):
    """Losses and final weights, with dropout, clipping, accumulation and tied weights."""
    expected = plain[1]["gpt" if scenario in ("selective", "full") else scenario.removeprefix("ddp ")]
    losses, found = spread[0][scenario]
    assert losses == pytest.approx(expected[0], abs=1e-6)
    assert_same(found, expected[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_ddp_sends_each_gradient_once_a_step(spread, name):
    """Of two micro-batches a rank; four steps."""
    assert spread[1][f"ddp {name}"] == N_STEPS


def test_every_weight_is_spread_and_every_block_a_group(spread):
    """T5: two stacks of two blocks, and the root."""
    assert spread[1]["spread"] and spread[1]["groups"] == 5


def test_bf16_rounds_the_weights_that_are_multiplied_only(plain, spread):
    losses, found = spread[0]["bf16"]
    assert losses != plain[1]["gpt"][0] and losses == pytest.approx(plain[1]["gpt"][0], rel=0.02)
    assert all(weight.dtype == torch.float32 for weight in found.values())


def test_resuming_a_spread_run_is_exact(plain, spread):
    """From one file and from a folder of shares."""
    losses, whole = spread[0]["gpt"]
    for file in ("half.ckpt", "folder.ckpt"):
        assert spread[0][f"from {file}"][0] == losses[HALF:]
        assert_same(spread[0][f"from {file}"][1], whole, 0.0)


def test_one_process_and_two_go_on_from_each_other(plain, spread):
    folder, (losses, whole) = plain[0], plain[1]["gpt"]
    assert spread[0]["from plain"][0] == pytest.approx(losses[HALF:], abs=1e-6)
    assert_same(spread[0]["from plain"][1], whole)
    checkpoint.write(checkpoint.read(folder / "folder.ckpt"), folder / "merged.ckpt")
    for file in ("half.ckpt", "merged.ckpt"):
        run = task("gpt")
        assert fit(run, "gpt", ckpt_path=folder / file) == pytest.approx(losses[HALF:], abs=1e-6)
        assert_same(weights(run), whole)


def shapes(node):
    """A tree with the shape and type in place of each tensor."""
    if isinstance(node, dict):
        return {key: shapes(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [shapes(child) for child in node]
    return (type(node), node.shape, node.dtype) if isinstance(node, torch.Tensor) else type(node)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_needs_whole_matrices_resumes_on_two_ranks_and_on_one(plain, spread, name):
    """From a folder of shares; merged, it goes on in one process."""
    losses, whole = spread[0][name]
    assert spread[0][f"from {name}"][0] == losses[HALF:]
    assert_same(spread[0][f"from {name}"][1], whole, 0.0)
    checkpoint.write(checkpoint.read(plain[0] / f"half-{name}.ckpt"), plain[0] / f"merged-{name}.ckpt")
    run = task("gpt", OPTIMIZERS[name])
    assert fit(run, "gpt", ckpt_path=plain[0] / f"merged-{name}.ckpt") == pytest.approx(losses[HALF:], abs=1e-6)
    assert_same(weights(run), whole)


@pytest.mark.parametrize("name", [*FAMILIES, *OPTIMIZERS])
def test_checkpoints_are_alike(plain, spread, name):
    """BEHAVIOUR 27: the same keys, shapes and types, moments by the same numbers."""
    one, two = (checkpoint.read(plain[0] / f"{file}.ckpt") for file in (f"one-{name}", name))
    assert shapes(one) == shapes(two)
    assert_same(one["optimizer_states"][0]["state"], two["optimizer_states"][0]["state"])
    assert list(one["state_dict"]) == list(two["state_dict"])


def test_a_spread_net_becomes_whole(spread):
    kind, found = spread[1]["whole"]
    assert kind == "EncoderDecoder"
    assert_same(found, spread[0]["t5"][1], 0.0)


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "llama"])
@pytest.mark.parametrize("words", [{}, {"block": "parallel", "position": "t5"}, {"share": 2}], ids=str)
def test_recomputed_blocks_give_the_same_gradients_with_dropout(name, words, how):
    ids = models.ids(2, 8)
    gradients = []
    for recompute in ("none", how):
        net = models.make(name, dropout=0.3, **words).train()
        engines.recompute_blocks(net, recompute)
        torch.manual_seed(0)
        models.logits(net, ids).square().mean().backward()
        gradients.append({key: weight.grad for key, weight in net.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


def test_recomputed_blocks_keep_their_input_only():
    """Of 2 x 2 rows of 8: far fewer numbers are kept for the backward pass than without."""
    kept = []
    for recompute in ("none", "full"):
        net = models.make("gpt", n_layers=4).train()
        engines.recompute_blocks(net, recompute)
        count = [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, count=count: count.__setitem__(0, count[0] + t.numel()) or t, lambda t: t
        ):
            net(models.ids(2, 8), readout=lambda head, hidden: hidden.sum())
        kept.append(count[0])
    assert kept[1] < kept[0] / 4


def test_filling_and_whole_leave_a_net_of_one_process_alone():
    one, other = models.make("bert", seed=1), models.make("bert", seed=2)
    engines.fill(one, other.state_dict())
    assert_same(dict(one.state_dict()), dict(other.state_dict()), 0.0)
    assert engines.whole(one, True) is one


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with newton_schulz_in_fp32():
        ranks.save(scenarios(ranks.folder(), ranks.rank()))


FAULTS = """
import resource, torch
from lmzoo import engines

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

before = min(faults() for _ in range(5))
engines.keep_memory()
print(before, min(faults() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc's malloc")
def test_freed_memory_is_kept():
    """Without it each block of 100 MB is faulted in page by page, with it soon not at all."""
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, kept = map(int, told.stdout.split())
    assert before >= 40 and kept <= before / 10
