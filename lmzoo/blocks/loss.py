"""Cross-entropy over a large vocabulary, as sums, without ever holding all the logits.

The head runs on the target rows only, a chunk of them at a time; with more than one chunk the logits of each are
thrown away and computed again in the backward pass, so memory grows with the chunk and not with the batch. The label
smoothing is that of Szegedy et al. 2015 (arXiv:1512.00567), the z-loss that of PaLM (Chowdhery et al. 2022,
arXiv:2204.02311).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # the label of a position that is no target


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> dict[str, Tensor]:
    """Sums over the rows whose label is not -100.

    head: (N, D) -> (N, V); hidden: (N, D); labels: (N,); chunk: the most rows whose logits exist at once.
    With p = softmax(logits), `loss` is the sum of (1 - s) * -log p[label] + s * mean over V of -log p + z * logZ^2 and
    carries the graph (also where there is no target: then it is 0 and its gradients are 0). The others carry none:
    `nll` is the sum of -log p[label] in nats, `correct` counts the rows whose largest logit is their label's, and
    `targets` counts the rows. The logits are taken to fp32 first.
    """
    kept = labels != IGNORED
    hidden, labels = hidden[kept], labels[kept]
    pieces = list(zip(hidden.split(chunk), labels.split(chunk), strict=True))
    sums = [
        checkpoint(_sums, head, *piece, label_smoothing, z_loss, use_reentrant=False)
        if len(pieces) > 1
        else _sums(head, *piece, label_smoothing, z_loss)
        for piece in pieces
    ]
    loss, nll, correct = (torch.stack(values).sum() for values in zip(*sums, strict=True))
    return {"loss": loss, "nll": nll.detach(), "correct": correct, "targets": kept.sum()}


def _sums(head, hidden: Tensor, labels: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    logits = head(hidden).float()
    log_z = logits.logsumexp(-1)
    nll = log_z - logits.gather(-1, labels[:, None]).squeeze(-1)
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1))
    if z_loss:
        loss = loss + z_loss * log_z.square()
    return loss.sum(), nll.sum(), (logits.argmax(-1) == labels).sum()
