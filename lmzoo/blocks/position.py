"""Where a token stands. One object with three hooks, each the identity unless a scheme overrides it:

embed(x, positions)          adds to the embedding               learned, sinusoidal
rotate(q, k, turn)           turns queries and keys              rotary
bias(q_pos, k_pos)           adds to the scores                  T5's buckets, ALiBi

What `rotate` needs of the positions is made by `turn(positions)`, once for all layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Position(nn.Module):
    """No positions at all (a causal model can still tell them: Haviv et al. 2022, arXiv:2203.16634)."""

    max_positions: int | None = None  # the longest row that the scheme can take; None: any
    rotates = False

    def __init__(self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool):
        super().__init__()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, T, D), positions (B or 1, T) -> (B, T, D)."""
        return x

    def rotate(self, q: Tensor, k: Tensor, turn) -> tuple[Tensor, Tensor]:
        """q (B, H, T, K) and k (B, H_kv, T, K), at the positions of ``turn`` -> the same shapes."""
        return q, k

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """What ``rotate`` needs of positions (B or 1, T) and all layers share."""
        return None

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Tensor | None:
        """(B or 1, T), (B or 1, S) -> (B or 1, H, T, S) in float32, or None."""
        return None


class Learned(Position):
    """A vector per position, up to max_len (Gehring et al. 2017, arXiv:1705.03122; BERT, GPT-2)."""

    def __init__(self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool):
        super().__init__(d_model, n_heads, d_head, max_len, causal)
        self.table, self.max_positions = nn.Embedding(max_len, d_model), max_len

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class Sinusoidal(Position):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(the same) (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool):
        super().__init__(d_model, n_heads, d_head, max_len, causal)
        if d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, got d_model={d_model}")
        self.d_model = d_model

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * inverse_frequencies(self.d_model, 10000.0, positions.device)
        return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)


class Rotary(Position):
    """Turn the pair (i, i + K/2) of queries and keys by p * theta^(-2i/K): scores depend on the distance only.

    Su et al. 2021, arXiv:2104.09864. ``fraction``: the part of a head that turns (GPT-NeoX: 0.25). ``scaling`` divides
    the positions (position interpolation, Chen et al. 2023, arXiv:2306.15595). Angles are float32 whatever the dtype of
    the model, since bfloat16 cannot tell position 256 from 257.
    """

    rotates = True
    amplitude = 1.0

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        max_len: int,
        causal: bool,
        *,
        theta: float = 10000.0,
        fraction: float = 1.0,
        scaling: float = 1.0,
    ):
        super().__init__(d_model, n_heads, d_head, max_len, causal)
        self.theta, self.scaling, self.d_rotary = theta, scaling, int(d_head * fraction)
        if self.d_rotary % 2 or not 0 < self.d_rotary <= d_head:
            raise ValueError(f"rotary positions need an even part of a head, got d_head={d_head} * fraction={fraction}")

    def rotate(self, q: Tensor, k: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.apply_turn(q, *turn), self.apply_turn(k, *turn)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of both halves, (B or 1, 1, T, d_rotary) each, float32; sines of the first are negative."""
        places = positions[:, None, :, None].float()  # whatever the default dtype: under bf16-true it is bfloat16
        angles = places * self.frequencies(positions.device)
        cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def frequencies(self, device) -> Tensor:
        """By how much each pair turns from one position to the next, (d_rotary / 2,) of radians."""
        return inverse_frequencies(self.d_rotary, self.theta, device) / self.scaling

    def apply_turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        whole = self.d_rotary == x.shape[-1]
        part = x if whole else x[..., : self.d_rotary]
        first, second = part.chunk(2, -1)
        turned = torch.addcmul(part * cos, torch.cat([second, first], -1), sin).to(x.dtype)
        return turned if whole else torch.cat([turned, x[..., self.d_rotary :]], -1)


class NTK(Rotary):
    """Rotary for rows ``scaling`` times as long as those of training, without any: theta * scaling^(K/(K-2)).

    The quickest pair turns as it did, the slowest ``scaling`` times slower ("NTK-aware" interpolation, Peng et al.
    2023, arXiv:2309.00071, section 3.1).
    """

    def frequencies(self, device) -> Tensor:
        power = self.d_rotary / (self.d_rotary - 2) if self.d_rotary > 2 else 1.0
        return inverse_frequencies(self.d_rotary, self.theta * self.scaling**power, device)


class YaRN(Rotary):
    """Rotary for rows ``scaling`` times as long as the ``trained_len`` of before: slow pairs alone turn slower.

    A pair that makes ``fast`` turns within trained_len keeps its frequency, one that makes ``slow`` turns has its
    frequency divided by scaling, those between are mixed in proportion to their place. Scores grow by
    (0.1 ln scaling + 1)^2 (Peng et al. 2023, arXiv:2309.00071).
    """

    def __init__(
        self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool, *, trained_len: int,
        fast: float = 32.0, slow: float = 1.0, **words: float,
    ):  # fmt: skip
        super().__init__(d_model, n_heads, d_head, max_len, causal, **words)
        if not slow < fast:
            raise ValueError(f"slow={slow} must be below fast={fast}")
        self.trained_len, self.fast, self.slow = trained_len, fast, slow
        self.amplitude = 0.1 * math.log(self.scaling) + 1.0

    def frequencies(self, device) -> Tensor:
        plain = inverse_frequencies(self.d_rotary, self.theta, device)
        first, last = max(0, math.floor(self.pair(self.fast))), min(math.ceil(self.pair(self.slow)), self.d_rotary - 1)
        slower = ((torch.arange(len(plain), device=device) - first) / max(last - first, 1e-3)).clamp(0, 1)
        return plain * (1 - slower) + plain / self.scaling * slower

    def pair(self, turns: float) -> float:
        """The place of the pair that makes so many turns within trained_len: where theta^(2i/K) is that over 2 pi."""
        return self.d_rotary / 2 * math.log(self.trained_len / (2 * math.pi * turns), self.theta)


class Llama3(Rotary):
    """Rotary for rows ``scaling`` times as long as the ``trained_len`` of before, as Llama 3.1 does it.

    A pair that makes ``high`` turns within trained_len keeps its frequency, one that makes fewer than ``low`` has it
    divided by scaling, those between are mixed in proportion to their turns (Llama team 2024, arXiv:2407.21783).
    """

    def __init__(
        self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool, *, trained_len: int,
        low: float = 1.0, high: float = 4.0, **words: float,
    ):  # fmt: skip
        super().__init__(d_model, n_heads, d_head, max_len, causal, **words)
        if not low < high:
            raise ValueError(f"low={low} must be below high={high}")
        self.trained_len, self.low, self.high = trained_len, low, high

    def frequencies(self, device) -> Tensor:
        plain = inverse_frequencies(self.d_rotary, self.theta, device)
        turns = self.trained_len * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / self.scaling)


class Alibi(Position):
    """bias = -slope_h * |q - k|, slopes a geometric series (Press et al. 2021, arXiv:2108.12409)."""

    def __init__(self, d_model: int, n_heads: int, d_head: int, max_len: int, causal: bool):
        super().__init__(d_model, n_heads, d_head, max_len, causal)
        self.slopes = alibi_slopes(n_heads)

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=q_pos.device)[:, None, None]
        return -slopes * (q_pos[:, None, :, None] - k_pos[:, None, None, :]).abs()


class Buckets(Position):
    """T5's relative bias: a learned number per head and bucket of distances, one table for all layers of a stack.

    Half of the buckets are exact distances, the others grow logarithmically up to ``max_distance``; without ``causal``
    each direction has its half of the table (Raffel et al. 2020, arXiv:1910.10683, section 2.1).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        max_len: int,
        causal: bool,
        *,
        n_buckets: int = 32,
        max_distance: int = 128,
    ):
        super().__init__(d_model, n_heads, d_head, max_len, causal)
        if not 1 <= n_buckets // (2 if causal else 4) < max_distance:
            raise ValueError(f"n_buckets={n_buckets} are too few, or too many for max_distance={max_distance}")
        self.causal, self.n_buckets, self.max_distance = causal, n_buckets, max_distance
        self.table = nn.Embedding(n_buckets, n_heads)

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        bucket = self.bucket(k_pos[:, None, :] - q_pos[:, :, None])
        return self.table(bucket).permute(0, 3, 1, 2).float()

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance key - query, any shape of ints."""
        n_buckets, start = self.n_buckets, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp(min=0)
        else:
            n_buckets //= 2
            start, distance = (distance > 0) * n_buckets, distance.abs()
        n_exact = n_buckets // 2
        growth = (distance.clamp(min=1).float() / n_exact).log() / math.log(self.max_distance / n_exact)
        far = (n_exact + (growth * (n_buckets - n_exact)).long()).clamp(max=n_buckets - 1)
        return start + torch.where(distance < n_exact, distance, far)


def inverse_frequencies(width: int, theta: float, device) -> Tensor:
    """theta^(-2i/width) for i < width/2, float32."""
    return theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ...; for n no power of two those of the power below, then every other of the power above."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == n_heads else slopes + alibi_slopes(2 * power)[0::2][: n_heads - power]
