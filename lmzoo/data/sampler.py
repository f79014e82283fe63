"""The order of training: which rows an optimizer step reads, as a function of (seed, step) and nothing else.

Each epoch is a keyed permutation of the rows, computed element by element: a Feistel network (Luby and Rackoff 1988) is
a bijection on numbers of an even count of bits, and walking along its cycles until one falls below n (Black and Rogaway
2002) makes it one on 0 .. n - 1. There is no index in memory, and step 10^9 costs what step 0 costs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import UserError

ROUNDS = 6


def permute(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Where a permutation of 0 .. n-1, chosen by `key`, sends each of `index`; int64 of the same shape."""
    half = max(1, -(-(n - 1).bit_length() // 2))  # 4^half >= n
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    value = np.asarray(index).astype(np.uint64)
    outside = np.ones(value.shape, bool)
    while outside.any():  # fewer than four turns are expected: n is more than a quarter of the numbers in play
        value[outside] = _feistel(value[outside], np.uint64(half), keys)
        outside = value >= n
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 .. 4^half - 1: rounds of (left, right) -> (right, left xor mix(right, key))."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ _mix(right ^ key) & mask
    return left << half | right


def _mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Micro(NamedTuple):
    """Rows of one forward. `number` counts the micro-batches of a step over all ranks; a filler carries no targets."""

    number: int
    epoch: int
    rows: np.ndarray
    filler: bool = False


class Windows:
    """For the torch loader: from `step` to the end of its epoch, what this rank reads in each optimizer step.

    A step is `batch_size` rows, the last of an epoch what is left. Its micro-batch m belongs to rank m % world; ranks
    that come out short get a filler, since all must run the same number of forwards.
    """

    def __init__(self, n_rows: int, batch_size: int, micro_batch_size: int, seed: int, rank: int = 0, world: int = 1):
        self.n_rows, self.batch_size, self.micro_batch_size = n_rows, batch_size, micro_batch_size
        self.seed, self.rank, self.world = seed, rank, world
        self.step = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-self.n_rows // self.batch_size)

    def window(self, step: int) -> list[Micro]:
        """The micro-batches of this rank in a step."""
        epoch, k = divmod(step, len(self))
        index = np.arange(k * self.batch_size, min((k + 1) * self.batch_size, self.n_rows))
        rows = permute(index, self.n_rows, (self.seed, epoch))
        micros = [Micro(m, epoch, rows[begin:begin + self.micro_batch_size])
                  for m, begin in enumerate(range(0, len(rows), self.micro_batch_size))]
        while len(micros) % self.world:
            micros.append(Micro(len(micros), epoch, micros[0].rows, filler=True))
        return micros[self.rank::self.world]

    def __iter__(self) -> Iterator[list[Micro]]:
        end = (self.step // len(self) + 1) * len(self)
        return map(self.window, range(self.step, end))


class Batches:
    """For validation and test: every row once, in order; of the batches rank r reads r, r + world, ...

    A rank beyond the last batch reads a filler, since no rank may be without one.
    """

    def __init__(self, n_rows: int, micro_batch_size: int, rank: int = 0, world: int = 1):
        self.n_rows, self.micro_batch_size, self.rank, self.world = n_rows, micro_batch_size, rank, world

    def __len__(self) -> int:
        return max(1, len(range(self.rank, -(-self.n_rows // self.micro_batch_size), self.world)))

    def __iter__(self) -> Iterator[Micro]:
        size = self.micro_batch_size
        for number in range(self.rank, -(-self.n_rows // size), self.world):
            yield Micro(number, 0, np.arange(number * size, min((number + 1) * size, self.n_rows)))
        if self.rank >= -(-self.n_rows // size):
            yield Micro(self.rank, 0, np.arange(min(size, self.n_rows)), filler=True)


def split_batch(batch_size: int, micro_batch_size: int | None, world: int) -> int:
    """Rows of a forward: `micro_batch_size`, or if None the largest divisor of `batch_size` that keeps every rank busy.

    Raises `UserError`, naming the nearest sizes that fit, if `micro_batch_size` does not divide `batch_size`.
    """
    if batch_size < 1:
        raise UserError(f"data.batch_size={batch_size} is not a positive number of rows")
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    if micro_batch_size is None:
        return max(size for size in divisors if size <= max(1, batch_size // world))
    if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise UserError(f"data.micro_batch_size={micro_batch_size!r} is not a positive number of rows (or null)")
    if micro_batch_size not in divisors:
        below = max(size for size in divisors if size < micro_batch_size)
        above = min((size for size in divisors if size > micro_batch_size), default=None)
        near = below if above is None else f"{below} or {above}"
        multiple = -(-batch_size // micro_batch_size) * micro_batch_size
        raise UserError(f"data.batch_size={batch_size} is not divisible by data.micro_batch_size={micro_batch_size}: "
                        f"set data.micro_batch_size={near}, or data.batch_size={multiple}")
    return micro_batch_size
