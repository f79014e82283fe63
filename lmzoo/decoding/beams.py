"""The bookkeeping of beam search: which rows go on, and which have ended best.

Each step looks at the 2 n likeliest continuations of a prompt's n running rows: at least n of them do not end. Ended
ones are ranked by log-probability / length^penalty (Wu et al. 2016, arXiv:1609.08144, in the simple form that
transformers has), and a prompt is done when n have ended and not even its best running row, as long as it is, ranks
above the last of them: transformers' ``early_stopping=False``, its default, which the results equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Beams:
    """B prompts with n running and n ended rows each, of at most ``max_new_tokens`` tokens, filled up with ``eos``."""

    def __init__(self, batch: int, n: int, max_new_tokens: int, length_penalty: float, eos: int | None, device):
        self.n, self.max_new_tokens, self.length_penalty = n, max_new_tokens, length_penalty
        self.eos, self.step = -1 if eos is None else eos, 0
        self.open = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.running = torch.full((batch, n, max_new_tokens), eos or 0, device=device)
        self.scores = torch.full((batch, n), -torch.inf, device=device)
        self.ended, self.ranks, self.totals = self.running, self.scores, self.scores
        self.lengths = torch.zeros_like(self.scores, dtype=torch.long)
        self.scores = self.scores.index_fill(1, self.lengths[0, :1], 0)  # all rows of a prompt are alike: one counts

    def advance(self, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """log_probabilities (B * n, V) of the next token -> (tokens (B * n,), the rows (B * n,) that they continue)."""
        (batch, n), vocabulary = self.scores.shape, log_probabilities.shape[-1]
        scores = (self.scores[..., None] + log_probabilities.view(batch, n, vocabulary)).flatten(1)
        best, index = scores.topk(min(2 * n, n * vocabulary))
        source, token = index // vocabulary, index % vocabulary
        rows = take(self.running, source)
        rows[:, :, self.step] = token
        self.step += 1
        ends = (token == self.eos) | (self.step == self.max_new_tokens)
        self._end(rows[:, :n], best[:, :n], ends[:, :n] & self.open)
        self.scores, on = best.masked_fill(ends, -torch.inf).topk(n)
        self.running = take(rows, on)
        self.open &= self.scores[:, :1] / self.step**self.length_penalty > self.ranks[:, -1:]
        first = torch.arange(batch, device=index.device)[:, None] * n
        return token.gather(1, on).flatten(), (first + source.gather(1, on)).flatten()

    def _end(self, rows: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Rank the rows that ``ends`` marks among those that have ended before."""
        ranks = (scores / self.step**self.length_penalty).masked_fill(~ends, -torch.inf)
        self.ranks, best = torch.cat([self.ranks, ranks], 1).topk(self.n)
        self.ended = take(torch.cat([self.ended, rows], 1), best)
        self.totals = torch.cat([self.totals, scores], 1).gather(1, best)
        self.lengths = torch.cat([self.lengths, torch.full_like(self.lengths, self.step)], 1).gather(1, best)

    def done(self) -> bool:
        """Whether nothing better can come."""
        return not self.open.any()

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """(rows (B, k, T), their log-probabilities (B, k)), the best first."""
        return self.ended[:, :k, : self.lengths[:, :k].max()], self.totals[:, :k]


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows (B, N, T), index (B, K) -> (B, K, T)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
