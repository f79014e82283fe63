"""The step that all tasks share: one gradient for any split over batches, micro-batches and ranks.

Run as a script this file is one of two ranks: it trains what `runs` lists and saves what came of it.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lmzoo.tasks.base import generator, kept, stack, wrap
from torch.nn import functional as F

import ranks
from small_steps import ADAMW, Net, assert_same, emptied, fit, joined, micro_batches, scaled, sgd, share, task, weights


def validation_batches(n=5):
    """Batches of 3 rows, the last one of 2."""
    batches = [{name: m[name] for name in ("input_ids", "labels")} for m in micro_batches(n, seed=77)]
    return batches[:-1] + [{name: rows[:2] for name, rows in batches[-1].items()}]


def scenarios(rank=0, world=1):
    """What one rank and two must agree on: {name: (weights, losses, targets, tokens, metrics)}."""
    even = [micro_batches(4, seed) for seed in range(3)]
    short = [micro_batches(3, seed) for seed in range(3)]
    empty = [even[0], [emptied(micro) for micro in even[1]], even[2]]
    results = {}
    for name, windows, settings in (
        ("even, with dropout", even, {"dropout": 0.3}),
        ("one rank runs short", short, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        ("a step without targets", empty, {}),
    ):
        trained = task(optim=ADAMW, **settings)
        ddp = {"strategy": DDPStrategy(broadcast_buffers=False), "devices": world} if world > 1 else {}
        outputs = fit(trained, [share(w, rank, world) for w in windows], validation_batches()[rank::world], **ddp)
        losses, targets, tokens = ([float(o[key]) for o in outputs] for key in ("loss", "targets", "tokens"))
        metrics = {key: float(value) for key, value in trained.trainer.callback_metrics.items()}
        results[name] = (weights(trained), losses, targets, tokens, metrics)
    return results


# --- the gradient


def test_gradient_is_that_of_the_mean_over_all_targets():
    """SGD at rate 1 without decay: the change of the weights is minus torch's own gradient of the mean."""
    window = micro_batches(4)
    whole = joined(window)[0]
    trained = task(optim=sgd(lr=1.0))
    before = weights(trained)
    net = Net()
    net.load_state_dict(trained.net.state_dict())
    loss = F.cross_entropy(net(whole["input_ids"]).flatten(0, 1), whole["labels"].flatten())
    loss.backward()
    (output,) = fit(trained, [window])
    for name, weight in net.named_parameters():
        assert_same(before[name] - weights(trained)[name], weight.grad)
    norm = torch.stack([weight.grad.norm() for weight in net.parameters()]).norm()
    assert output["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert output["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert output["targets"] == (whole["labels"] != -100).sum()
    assert output["tokens"] == whole["input_ids"].numel()


def test_every_split_is_the_same_run():
    """Three steps and a shorter fourth, as one batch, in micro-batches, and with a micro-batch that has no target."""
    windows = [micro_batches(4, seed) for seed in range(3)] + [micro_batches(3, 9)]
    with_empty = [[emptied(window[0]), *window] for window in windows]
    results = []
    for arranged in (windows, [joined(window) for window in windows], with_empty):
        trained = task(optim=ADAMW, label_smoothing=0.1, z_loss=1e-3)
        outputs = fit(trained, arranged)
        results.append((weights(trained), [[float(o[key]) for key in ("loss", "targets", "tokens")] for o in outputs]))
    for found, outputs in results[1:]:
        assert_same(found, results[0][0])
        np.testing.assert_allclose(outputs, results[0][1], rtol=1e-6)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What the scenarios give on each of two gloo ranks."""
    return ranks.run(__file__, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_are_the_same_run_as_one(two_ranks):
    """Weights, losses, counts and validation, with dropout, an uneven share of the micro-batches, and an empty step."""
    for name, (expected, *numbers, metrics) in scenarios().items():
        for rank in two_ranks:
            found, *others, measured = rank[name]
            assert_same(found, expected)
            np.testing.assert_allclose(others, numbers, rtol=1e-6, err_msg=name)
            assert measured == pytest.approx(metrics, rel=1e-6), name


def test_a_step_without_targets_changes_nothing_and_warns_once(recwarn):
    """Empty windows change neither weights nor moments nor the schedule; they count as steps, and warn once."""
    full = [micro_batches(2, seed) for seed in range(2)]
    empty = [emptied(micro) for micro in full[0]]
    steps = []

    def noted(step, total_steps):
        steps.append((step, total_steps))
        return 1 / (1 + step)

    reference, trained = task(optim=ADAMW, schedule=noted), task(optim=ADAMW, schedule=noted, total_steps=4)
    fit(reference, full)
    steps.clear()
    outputs = fit(trained, [full[0], empty, empty, full[1]])
    assert_same(weights(trained), weights(reference), 0.0)
    assert steps == [(0, 4), (1, 4), (1, 4), (1, 4)]
    assert trained.global_step == 4 and trained.steps_taken == 2
    assert [float(output["loss"]) for output in outputs[1:3]] == [0, 0]
    assert sum("no target" in str(warning.message) for warning in recwarn) == 1


# --- the learning rate, clipping, precision


def test_learning_rate_follows_the_schedule():
    trained = task(optim=sgd(0.5), schedule=lambda step, total: (step + 1) / total, total_steps=5)
    outputs = fit(trained, [micro_batches(1, seed) for seed in range(3)])
    assert [output["lr"] for output in outputs] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_clipping(clip_norm):
    """The norm that is reported is the one before clipping; the step is as long as the limit allows."""
    trained = task(optim=sgd(1.0, clip_norm))
    before = weights(trained)
    (output,) = fit(trained, [micro_batches(2)])
    step = torch.cat([(before[name] - after).flatten() for name, after in weights(trained).items()]).norm()
    assert output["grad_norm"] > 0.1
    assert step.item() == pytest.approx(clip_norm or float(output["grad_norm"]), rel=1e-3)


def test_fp16_reports_and_clips_unscaled_gradients():
    plain, half = (task(optim=ADAMW) for _ in range(2))
    expected = fit(plain, [micro_batches(2)])
    found = fit(half, [micro_batches(2)], plugins=[scaled(1024.0)])
    assert found[0]["grad_norm"] == pytest.approx(float(expected[0]["grad_norm"]), rel=1e-2)
    assert_same(weights(half), weights(plain), 0.03)


def test_a_step_that_fp16_skips_is_reported_and_does_not_move_the_schedule():
    steps, net = [], Net()
    net.dropout = torch.nn.Linear(8, 8)  # a body: the head's gradients never meet the scale in fp16
    trained = task(net, ADAMW, schedule=lambda step, total: steps.append(step) or 1.0)
    before = weights(trained)
    with pytest.warns(UserWarning, match="step 1 was skipped: a gradient overflowed"):
        fit(trained, [micro_batches(1)], plugins=[scaled(2.0**40)])
    assert_same(weights(trained), before, 0.0)
    assert trained.steps_taken == 0 and trained.global_step == 1
    fit(trained, [micro_batches(1, seed) for seed in range(2)], plugins=[scaled(1024.0)])
    assert steps == [0, 0, 1]


def test_fp16_on_an_encoder_decoder_warns():
    net = Net()
    net.family = "encoder-decoder"
    with pytest.warns(UserWarning, match="encoder-decoders often overflow in fp16"):
        fit(task(net, ADAMW), [micro_batches(1)], plugins=[scaled(1024.0)])


# --- randomness and checkpoints


def test_dropout_belongs_to_seed_step_and_micro_batch():
    """Whatever was drawn before, and in whatever order the micro-batches come."""
    def losses(window, seed=0):
        return float(fit(task(dropout=0.5, seed=seed), [window])[0]["loss"])

    window = micro_batches(3)
    assert losses(window[::-1]) == pytest.approx(losses(window), rel=1e-6)
    renumbered = [micro | {"micro": micro["micro"] + 1} for micro in window]
    assert len({round(loss, 5) for loss in (losses(window), losses(window, seed=1), losses(renumbered))}) == 3


def test_steps_taken_and_identity_are_in_the_checkpoint():
    trained, resumed, checkpoint = task(optim=ADAMW), task(), {}
    trained.identity = {"version": "1"}
    fit(trained, [micro_batches(1, seed) for seed in range(3)])
    trained.on_save_checkpoint(checkpoint)
    assert checkpoint["lmzoo"] == {"version": "1", "steps_taken": 3}
    resumed.on_load_checkpoint(checkpoint)
    assert resumed.steps_taken == 3


def test_resumed_rates_start_from_the_base_rate(tmp_path):
    """The optimizer's state holds the scheduled rate of its last step; the base rate comes back with it."""
    def halving(step, total_steps):
        return 1 / 2**step

    first, second = (task(optim=ADAMW, schedule=halving) for _ in range(2))
    outputs = fit(first, [micro_batches(1, seed) for seed in range(2)])
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    outputs += fit(second, [micro_batches(1, 2)], max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert [output["lr"] for output in outputs] == pytest.approx([0.02, 0.01, 0.005])


# --- evaluation


def test_evaluation_is_the_mean_over_all_targets_for_any_batch_size():
    """And perplexity its exp; against torch on all rows at once. Label smoothing and z-loss are off."""
    batches = validation_batches()
    singles = [{name: rows[i : i + 1] for name, rows in b.items()} for b in batches for i in range(len(b["labels"]))]
    logits = task().net(torch.cat([b["input_ids"] for b in batches])).flatten(0, 1)
    labels = torch.cat([b["labels"] for b in batches]).flatten()
    nats = F.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(-1) == labels)[labels != -100].float().mean().item()
    for split in (batches, singles):
        evaluated = task(optim=sgd(0.0), label_smoothing=0.3, z_loss=0.5)
        fit(evaluated, [micro_batches(1)], split)
        metrics = {name: value.item() for name, value in evaluated.trainer.callback_metrics.items()}
        expected = {"val/loss": nats, "val/perplexity": math.exp(nats), "val/accuracy": accuracy}
        assert metrics == pytest.approx(expected, rel=1e-6)
        sums = evaluated.eval().loss(batches[-1])
        assert torch.equal(sums["loss"], sums["nll"])


def test_summary_of_nothing_and_of_the_worst():
    sums = {"nll": 0.0, "correct": 0.0, "targets": 0.0}
    assert task().summarise(sums, "val") == {"loss": 0.0, "perplexity": 1.0, "accuracy": 0.0}
    assert task().summarise(sums | {"nll": 1e6, "targets": 1.0}, "val")["perplexity"] == math.inf


# --- what collators share


def test_rows_are_filled_on_the_right_and_known_by_their_length():
    rows = [np.array([5, 0]), np.array([], dtype=int), np.array([7])]
    assert stack(rows, 0).tolist() == [[5, 0], [0, 0], [7, 0]]
    assert kept(rows).tolist() == [[1, 1], [0, 0], [1, 0]]
    assert stack(rows[1:2], 9).tolist() == [[9]]


def test_random_numbers_belong_to_their_key():
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**40, 0, 0), (0, 0, 2**40)]
    draws = [generator(*key).random(4).tolist() for key in keys]
    assert draws == [generator(*key).random(4).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)


def test_wrapped_text_fits_100_columns():
    text = wrap("word\n " * 60, "  ")
    assert all(len(line) <= 100 and line.startswith("  word") for line in text.splitlines())
    assert text.split() == ["word"] * 60


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks.save(scenarios(ranks.rank(), 2))
