"""Draw a token from logits.

Top-k: Fan et al. 2018 (arXiv:1805.04833); nucleus, or top-p: Holtzman et al. 2019 (arXiv:1904.09751); min-p: Nguyen et
al. 2024 (arXiv:2407.01082); repetition penalty: Keskar et al. 2019 (arXiv:1909.05858).

A draw is one uniform number u in (0, 1], a token the first whose cumulated probability reaches u. All numbers of a row
are drawn from its own seed before the first step, so that a row's text depends on nothing but the row and the seed, and
a step needs no other number than the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uniforms(seed: int, n_rows: int, n: int, device: torch.device) -> Tensor:
    """(n_rows, n) numbers in (0, 1]; row i from ``seed`` + i."""
    generators = (torch.Generator().manual_seed(seed + i) for i in range(n_rows))
    rows = [torch.rand(n, generator=generator, dtype=torch.float64) for generator in generators]
    return (1 - torch.stack(rows)).to(device, torch.float32 if device.type == "mps" else torch.float64)


def distribution(
    logits: Tensor,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """logits (B, V) -> (probabilities (B, K) up to a factor a row, their ids (B, K); None: all ids in order).

    Each takes away from what the one before it has left: the k likeliest; the fewest that hold p of the probability;
    those at least min_p times as likely as the likeliest.
    """
    ids = None
    if temperature is not None:
        logits = logits / temperature
    if top_k is not None:
        logits, ids = logits.topk(top_k)
    elif top_p is not None and top_p < 1:
        logits, ids = logits.sort(descending=True)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0)
    if min_p is not None:
        least = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return probabilities, ids


def draw(probabilities: Tensor, ids: Tensor | None, u: Tensor) -> Tensor:
    """What ``distribution`` gives, and u (B,) -> ids (B,)."""
    cumulated = probabilities.to(u.dtype).cumsum(-1)
    chosen = torch.searchsorted(cumulated, u[:, None] * cumulated[:, -1:])
    return (chosen if ids is None else ids.gather(1, chosen))[:, 0]


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """scores (B, V) with those of the tokens in ``seen`` (B, V) lowered: positive ones divided, others multiplied."""
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
