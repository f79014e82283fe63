"""The chunked cross-entropy against torch's own, and against numbers from paper."""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lmzoo.blocks.loss import cross_entropy


def rows(n=37, d=8, v=11, ignored=5, seed=0):
    torch.manual_seed(seed)
    head, hidden, labels = nn.Linear(d, v), torch.randn(n, d, requires_grad=True), torch.randint(v, (n,))
    labels[torch.randperm(n)[:ignored]] = -100
    return head, hidden, labels


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def test_by_hand():
    """Two rows of two logits: p = (3/4, 1/4) with label 1, and p = (1/2, 1/2) with label 0."""
    logits = torch.tensor([[math.log(3), 0.0], [5.0, 5.0], [9.0, 1.0]])
    with torch.no_grad():
        sums = cross_entropy(nn.Identity(), logits, torch.tensor([1, 0, -100]))
    assert sums["nll"].item() == pytest.approx(math.log(4) + math.log(2), rel=1e-6)
    assert sums["loss"].item() == pytest.approx(sums["nll"].item())
    assert (sums["correct"].item(), sums["targets"].item()) == (1, 2)  # the likeliest of equals is the first
    # Z is 4 and 2 e^5
    with_z = cross_entropy(nn.Identity(), logits, torch.tensor([1, 0, -100]), z_loss=0.1)
    penalty = 0.1 * (math.log(4) ** 2 + (math.log(2) + 5) ** 2)
    assert (with_z["loss"] - with_z["nll"]).item() == pytest.approx(penalty, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_equals_torch(smoothing, chunk):
    head, hidden, labels = rows()
    sums = cross_entropy(head, hidden, labels, label_smoothing=smoothing, chunk=chunk)
    expected = F.cross_entropy(head(hidden), labels, reduction="sum", label_smoothing=smoothing, ignore_index=-100)
    torch.testing.assert_close(sums["loss"], expected)
    torch.testing.assert_close(sums["nll"], F.cross_entropy(head(hidden), labels, reduction="sum"))
    with torch.no_grad():
        correct = cross_entropy(head, hidden, labels, chunk=chunk)["correct"]
    assert correct == (head(hidden).argmax(-1) == labels).sum()
    leaves = (hidden, head.weight, head.bias)
    for ours, theirs in zip(gradients(sums["loss"], *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_give_the_plain_gradient(autocast):
    head, hidden, labels = rows(n=101)
    results = []
    for chunk in (1000, 7):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            sums = cross_entropy(head, hidden, labels, label_smoothing=0.1, z_loss=1e-3, chunk=chunk)
        results.append((sums["loss"], *gradients(sums["loss"], hidden)))
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_logits_never_exist_as_a_whole():
    """Of 64 rows in chunks of 8, the head sees 8 at a time and once only, and afterwards no logits are left."""
    head, hidden, labels = rows(n=64, d=2, v=100, ignored=0)
    seen, kept = [], []

    def watched(rows):
        seen.append(len(rows))
        return head(rows)

    def note(tensor):
        kept.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = cross_entropy(watched, hidden, labels, chunk=8)["loss"]
    left = [reference().shape for reference in kept if reference() is not None]
    assert left and {*left} <= {hidden.shape, head.weight.shape, head.bias.shape, labels.shape}
    loss.backward()
    assert seen == [8] * 8


def test_gradients_reach_a_tied_weight_from_both_sides():
    """The embedding's gradient is the sum of what the head and the body ask for, as without chunks."""
    torch.manual_seed(0)
    weight, ids, labels = torch.randn(11, 8, requires_grad=True), torch.arange(9), torch.arange(9).flip(0)


    def hidden():
        return F.embedding(ids, weight).tanh()

    ours = cross_entropy(lambda rows: rows @ weight.T, hidden(), labels, chunk=4)["loss"] / 9
    theirs = F.cross_entropy(hidden() @ weight.T, labels)
    torch.testing.assert_close(*(gradients(loss, weight) for loss in (ours, theirs)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_what_is_frozen_gets_no_gradient(frozen):
    head, hidden, labels = rows()
    head.requires_grad_(frozen != "head")
    hidden = hidden.detach().requires_grad_(frozen != "body")
    cross_entropy(head, hidden, labels, chunk=7)["loss"].backward()
    assert (head.weight.grad is None) == (frozen == "head") and (hidden.grad is None) == (frozen == "body")


def test_evaluation_takes_no_gradients():
    head, hidden, labels = rows()
    with torch.no_grad():
        assert not cross_entropy(head, hidden, labels, chunk=7)["loss"].requires_grad
    assert "correct" not in cross_entropy(head, hidden, labels, chunk=7)  # nobody looks at it in training


def test_ignored_rows_change_nothing():
    head, hidden, labels = rows()
    keep = labels != -100
    whole = cross_entropy(head, hidden, labels, label_smoothing=0.1, z_loss=0.1)
    alone = cross_entropy(head, hidden[keep], labels[keep], label_smoothing=0.1, z_loss=0.1)
    for name in ("loss", "nll", "targets"):
        assert torch.equal(whole[name], alone[name])
    (gradient,) = gradients(whole["loss"], hidden)
    assert (gradient[~keep] == 0).all() and (gradient[keep] != 0).any(-1).all()


def test_no_target_is_zero_with_a_graph():
    head, hidden, labels = rows()
    sums = cross_entropy(head, hidden, torch.full_like(labels, -100), label_smoothing=0.1, z_loss=0.1)
    assert [sums[name].item() for name in ("loss", "nll", "targets")] == [0, 0, 0]
    for gradient in gradients(sums["loss"], hidden, head.weight, head.bias):
        assert (gradient == 0).all()


def test_loss_is_fp32_under_half_precision():
    """A bf16 sum would stop at 512 rows of ln 2 with an error of about 1."""
    sums = cross_entropy(nn.Identity(), torch.zeros(512, 2, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.long))
    assert sums["loss"].item() == pytest.approx(512 * math.log(2), rel=1e-6)
