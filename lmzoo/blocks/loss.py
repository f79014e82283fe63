"""Cross-entropy over a large vocabulary, as sums, without ever holding all the logits.

The head runs on the target rows only, a chunk of them at a time. Where gradients are wanted they are taken at once,
while the logits of the chunk are there, and kept until the backward pass asks for them: no logits are kept or computed
twice, so memory grows with the chunk and not with the batch (as in Liger Kernel: Hsu et al. 2024, arXiv:2410.10989).
The label smoothing is that of Szegedy et al. 2015 (arXiv:1512.00567), the z-loss that of PaLM (Chowdhery et al. 2022,
arXiv:2204.02311).
"""

import math
from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100  # the label of a position that is no target
ROWS = {"cpu": 1024, "cuda": 4096}  # of a chunk: few logits, but a sum of the weights' gradients for each chunk
FP32_ROWS = {"cpu": 128, "cuda": 512}  # of these in fp32 at a time: as many as a CPU's cache holds


def perplexity(nats: float) -> float:
    """e^nats of a mean over targets; infinite where no float holds it."""
    return math.exp(nats) if nats < 700 else math.inf


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    device: str | None = None,
) -> dict[str, Tensor]:
    """Sums over the rows whose label is not -100.

    head: (N, D) -> (N, V); hidden: (N, D); labels: (N,); chunk: the most rows whose logits exist at once (None: ROWS of
    the `device`, which is that of `hidden` unless another's use of memory is to be seen).
    With p = softmax(logits), `loss` is the sum of (1 - s) * -log p[label] + s * mean over V of -log p + z * logZ^2 and
    carries the graph (also where there is no target: then it is 0 and its gradients are 0). The others carry none:
    `nll` is the sum of -log p[label] in nats, and `targets` counts the rows. Where no gradients are wanted, `correct`
    counts the rows whose largest logit is their label's. The logits are taken to fp32 first.
    """
    device = device or hidden.device.type
    kept, chunk, few = labels != IGNORED, chunk or ROWS.get(device, 1024), FP32_ROWS.get(device, 512)
    hidden, labels = hidden[kept], labels[kept]
    sums, weights, of_rows, of_weights = [], [], [], []
    for rows, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        rows = rows.detach().requires_grad_(torch.is_grad_enabled())
        logits = head(rows)
        weights = weights or list(leaves(logits, rows))
        slope = torch.empty_like(logits) if logits.requires_grad else None
        slopes = repeat(None) if slope is None else slope.split(few)
        for some in zip(logits.detach().split(few), targets.split(few), slopes, strict=False):
            sums.append(_sums(*some, label_smoothing, z_loss))
        if slope is not None:
            gradient, *more = torch.autograd.grad(logits, (rows, *weights), slope)
            of_rows.append(gradient)
            of_weights = [total + one for total, one in zip(of_weights, more, strict=True)] if of_weights else more
    found = {name: torch.stack([one[name] for one in sums]).sum() for name in sums[0]} | {"targets": kept.sum()}
    if of_rows:
        found["loss"] = _Known.apply(found["loss"], (torch.cat(of_rows), *of_weights), hidden, *weights)
    return found


def _sums(logits: Tensor, labels: Tensor, slope: Tensor | None, label_smoothing: float, z_loss: float) -> dict:
    """Sums of the loss and of -log p[label]; and `slope` becomes the loss's derivative by the logits, or where there is
    none, right guesses are counted."""
    values = logits.float()
    p, own = values.softmax(-1), values.gather(-1, labels[:, None]).squeeze(-1)
    log_z = values.amax(-1) - p.amax(-1).log()
    nll = log_z - own
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - values.mean(-1))
    if z_loss:
        loss = loss + z_loss * log_z.square()
    sums = {"loss": loss.sum(), "nll": nll.sum()}
    if slope is None:
        return sums | {"correct": (values.argmax(-1) == labels).sum()}
    if z_loss:
        p *= 1 + 2 * z_loss * log_z[:, None]
    if label_smoothing:
        p -= label_smoothing / p.shape[-1]
    p.scatter_add_(-1, labels[:, None], torch.full_like(nll, label_smoothing - 1)[:, None])
    slope.copy_(p)
    return sums


def log_probabilities(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p (N,) of `labels` (N,) after `hidden` (N, D), and whether each is the likeliest, some rows at a time."""
    chunk, found = ROWS.get(hidden.device.type, 1024), []
    for rows, wanted in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        logits = head(rows).float()
        chosen = logits.gather(-1, wanted[:, None]).squeeze(-1)
        found.append(((chosen - logits.logsumexp(-1)).double(), logits.argmax(-1) == wanted))
    return tuple(map(torch.cat, zip(*found, strict=True)))


class _Known(torch.autograd.Function):
    """A value whose gradients by its inputs are known already."""

    @staticmethod
    def forward(ctx, value: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * factor for gradient in ctx.saved_tensors)


def leaves(tensor: Tensor, *but: Tensor) -> Iterator[Tensor]:
    """The tensors that gradients of `tensor` end in, `but` some."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [source for source, _ in node.next_functions]
        if hasattr(node, "variable") and all(node.variable is not one for one in but):
            yield node.variable
