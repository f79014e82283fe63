"""Steps that are not finite: what they leave untouched, what is said of them, and where the run stops.

Run as a script this file is one of two ranks.
"""

import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

import lmzoo
import ranks
import small_run
from lmzoo import UserError
from lmzoo.callbacks import Guard
from lmzoo.callbacks.guards import first_place
from lmzoo.engines import FSDP, gathered
from lmzoo.errors import Diverged
from models import FAMILIES, ids, logits, make
from small_steps import ADAMW, Net, fit, micro_batches, scaled, share, task, weights
from tiny_run import TASKS, spoken, texts

POISON = 12  # an id that no batch below has


class Break(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * torch.inf


class Fragile(Net):
    """Whoever reads POISON gets numbers that are none: in the forward, or in the gradient of the embedding only."""

    def __init__(self, backward=False):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Identity(), Poisoned(backward))

    def forward(self, input_ids, attention_mask=None, readout=None):
        self.inner[1].poisoned = bool((input_ids == POISON).any())
        return readout(self.head, self.inner(self.embed(input_ids)))


class Poisoned(torch.nn.Module):
    def __init__(self, backward):
        super().__init__()
        self.backward, self.poisoned = backward, False

    def forward(self, x):
        if not self.poisoned:
            return x
        return Break.apply(x) if self.backward else x / 0


class Steps(Callback):
    """Weights and moments after each step, and what it put out."""

    def __init__(self):
        self.weights, self.moments, self.outputs = [], [], []

    def on_train_batch_end(self, trainer, task, output, *_):
        self.outputs.append(output)
        self.weights.append(weights(task))
        state = trainer.optimizers[0].state
        self.moments.append([value.clone() for weight in state.values() for value in weight.values()])


def windows(poisoned, n=6, bad=2):
    """n steps of 4 micro-batches; those in `poisoned` read POISON in the `bad` one."""
    found = [micro_batches(4, seed) for seed in range(n)]
    for window in found:
        for micro in window:
            micro["input_ids"] = micro["input_ids"] % POISON
    for step in poisoned:
        found[step][bad]["input_ids"][0, 0] = POISON
    return found


def run(tmp_path, poisoned, backward=False, recipe=ADAMW, stop_after=3, rank=0, world=1, bad=2, **settings):
    """(the task, the steps' outputs, what they left, the guard or what it raised) of six steps."""
    steps, guard = Steps(), Guard(tmp_path, stop_after)
    torch.manual_seed(0)
    trained = task(Fragile(backward), recipe, total_steps=6, schedule=lambda step, total: 1 / (1 + step))
    given = [share(window, rank, world) for window in windows(poisoned, bad=bad)]
    try:
        fit(trained, given, callbacks=[steps, guard], **settings)
    except Diverged as error:
        return trained, steps.outputs, steps, error
    return trained, steps.outputs, steps, guard


RECIPES = {
    "adamw": ADAMW,
    "fused": ADAMW | {"optimizer": partial(torch.optim.AdamW, fused=True)},
    "sgd": ADAMW | {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
    "adafactor": ADAMW | {"optimizer": partial(torch.optim.Adafactor)},
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, recipe, backward):
    """Weights, moments and schedule are those of before it; the next one is taken; losses stay finite."""
    with pytest.warns(UserWarning, match="step 3 was skipped: its loss or gradient is not finite"):
        trained, outputs, steps, _ = run(tmp_path, [2], backward, RECIPES[recipe])
    assert all(torch.equal(steps.weights[1][name], steps.weights[2][name]) for name in steps.weights[1])
    assert all(map(torch.equal, steps.moments[1], steps.moments[2]))
    assert not torch.equal(steps.weights[2]["head.weight"], steps.weights[3]["head.weight"])
    assert [output["lr"] for output in outputs] == pytest.approx([0.02 / n for n in (1, 2, 3, 3, 4, 5)])
    assert [output["skipped"] for output in outputs] == [0, 0, 1, 1, 1, 1] and trained.global_step == 6
    assert all(torch.isfinite(output["loss"]) for output in outputs) and outputs[2]["targets"] == 0
    assert [i for i, output in enumerate(outputs) if "nonfinite" in output] == [2]


@pytest.mark.parametrize(
    ("backward", "place"), [(False, r"inner\.1 on rank 0, micro-batch 2"), (True, r"the gradient of embed\.weight")]
)
def test_the_place_where_it_began_is_named(tmp_path, backward, place):
    with pytest.warns(UserWarning, match=f"first in {place}"):
        run(tmp_path, [2], backward)


def test_a_loss_that_alone_is_not_finite(tmp_path):
    trained = task(Net(), ADAMW)
    whole = trained.loss
    trained.loss = lambda batch: {name: value * torch.nan for name, value in whole(batch).items()}
    with pytest.warns(UserWarning, match="first in the loss on rank 0, micro-batch 0"):
        fit(trained, windows([], 1), callbacks=[Guard(tmp_path)])


def test_three_in_a_row_stop_the_run(tmp_path):
    """Not three with a good one between; the message names the newest checkpoint, and how a command ends is 1."""
    with pytest.warns(UserWarning):
        assert isinstance(run(tmp_path, [0, 1, 3, 4])[-1], Guard)
        _, outputs, _, error = run(tmp_path, [1, 2, 3])
        assert isinstance(run(tmp_path, [1, 2, 3], stop_after=None)[-1], Guard)
    assert len(outputs) == 4 and isinstance(error, UserError) and error.exit_code == 1
    assert "3 steps in a row were not finite" in str(error) and "nothing was saved yet" in str(error)
    assert "\n" not in str(error)


def test_the_count_goes_on_in_a_resumed_run(tmp_path):
    guard, again = Guard(tmp_path, 3), Guard(tmp_path, 3)
    guard.in_a_row = 2
    again.load_state_dict(guard.state_dict())
    assert again.in_a_row == 2


def test_fp16_counts_a_loss_and_leaves_an_overflowing_gradient_to_its_scaler(tmp_path):
    with pytest.warns(UserWarning, match="a gradient overflowed in fp16"):
        _, outputs, steps, guard = run(tmp_path, [1, 2, 3], backward=True, plugins=[scaled(256.0)])
    assert guard.in_a_row == 0 and not any("nonfinite" in output for output in outputs) and len(outputs) == 6
    with pytest.warns(UserWarning, match="its loss or gradient is not finite, first in inner.1 on rank 0"):
        _, outputs, steps, error = run(tmp_path, [1, 2, 3], plugins=[scaled(256.0)])
    assert isinstance(error, Diverged)
    assert all(torch.equal(steps.weights[0][name], steps.weights[2][name]) for name in steps.weights[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_net_has_no_such_place(family):
    """No module of any family puts out -inf or nan by design, as in a mask."""
    net, rows = make(FAMILIES[family]), ids(2, 12)
    sound = SimpleNamespace(net=net, micro_loss=lambda *_: logits(net, rows).sum())
    trainer = SimpleNamespace(global_rank=0, precision_plugin=SimpleNamespace(train_step_context=nullcontext))
    found = first_place(trainer, sound, [{"micro": 0}], 0)
    assert found is None and not any(module._forward_hooks for module in net.modules())


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    def spoil(trainer):
        with torch.no_grad():
            trainer.lightning_module.net.bias.fill_(torch.nan)

    with pytest.warns(UserWarning, match="step 12 is not saved: its weights are not finite"):
        small_run.run(tmp_path, small_run.At(10, spoil), keep_last=9)
    steps = [name for name in small_run.names(tmp_path) if name.startswith("step")]
    assert steps == ["step-000004.ckpt", "step-000008.ckpt"]
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("trainer=ddp", "trainer.accelerator=cpu", "data.micro_batch_size=2")])
def test_a_command_that_diverges_ends_with_one_line(tmp_path, ranks):
    """Its code is 1, on two ranks too, and the checkpoint that it names can be loaded."""
    words = spoken(texts(tmp_path), *TASKS["clm"], "optim=sgd", "optim.lr=1000", "optim.clip_norm=null",
                   "schedule=constant", "trainer.max_steps=40", f"run_dir={tmp_path / 'run'}", *ranks)  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "lmzoo.train", *words], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("lmzoo: 3 steps in a row were not finite")
    state = lmzoo.load(re.search(r"the last good checkpoint is (\S+);", line)[1]).state_dict()
    assert all(weight.isfinite().all() for weight in state.values())


ENGINES = {"ddp": partial(DDPStrategy, broadcast_buffers=False), "fsdp": FSDP}


def two(folder, rank=0, world=1):
    """What a rank saw under each engine of two runs: micro-batch 1 of step 2 has a bad output, or a bad gradient."""
    return {engine: under(engine, folder, rank, world) for engine in (ENGINES if world > 1 else ("one",))}


def under(engine, folder, rank, world):
    results = []
    for backward in (False, True):
        spread = {"strategy": ENGINES[engine](), "devices": 2} if world > 1 else {}
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            trained, outputs, steps, _ = run(folder, [1], backward, rank=rank, world=world, bad=1, **spread)
        said = [str(one.message) for one in heard if "was skipped" in str(one.message)]
        kept = [all(map(torch.equal, steps.moments[i], steps.moments[i + 1])) for i in range(3)]
        kept += [all(map(torch.equal, steps.weights[i].values(), steps.weights[i + 1].values())) for i in range(3)]
        results.append((gathered(weights(trained), True), [output["skipped"] for output in outputs], said, kept))
    return results


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return ranks.run(__file__, folder), two(folder)["one"]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_skip_alike(spread, engine):
    """The bad micro-batch is rank 1's; both skip and change nothing in step 2 only, end with the weights of one
    process, and rank 0 says whose it was."""
    found, expected = spread
    for rank, results in enumerate(found):
        for (ours, skipped, said, kept), (theirs, wanted, told, _) in zip(results[engine], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
            assert kept == 2 * [True, False, False]
            assert skipped == wanted == [0, 1, 1, 1, 1, 1]
            assert said == ([one.replace("on rank 0", "on rank 1") for one in told] if rank == 0 else [])


if __name__ == "__main__":
    ranks.save(two(ranks.folder(), ranks.rank(), 2))


@pytest.mark.parametrize("stop_after", [3, None])
def test_a_short_run_of_which_no_step_was_finite_does_not_end_well(tmp_path, stop_after):
    """Two steps of two; of two steps one that is finite is enough."""
    for poisoned, ends in ([0, 1], Diverged), ([0], None), ([1], None):
        trained = task(Fragile(False), ADAMW, total_steps=2)
        with pytest.warns(UserWarning), pytest.raises(ends) if ends else nullcontext():
            fit(trained, windows(poisoned, 2), callbacks=[Guard(tmp_path, stop_after)], max_steps=2)
