"""The order of training: which rows an optimizer step reads, as a function of (seed, step) and nothing else.

Each epoch is a keyed permutation of the rows, computed element by element: a Feistel network (Luby and Rackoff 1988) is
a bijection on numbers of an even count of bits, and walking along its cycles until one falls below n (Black and Rogaway
2002) makes it one on 0 .. n - 1. There is no index in memory, and step 10^9 costs what step 0 costs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..draws import mix
from ..errors import UserError

ROUNDS = 6
AHEAD = 1024  # rows whose order is worked out at once: it takes hardly longer than for a few


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
        left, right = right, left ^ mix(right ^ key) & mask
    return left << half | right


class Shuffled:
    """The order of one corpus: each epoch permutes its rows anew, and its last step reads what is left of them."""

    def __init__(self, n_rows: int, seed: int):
        self.n_rows, self.seed = n_rows, seed
        self._ahead = (-1, 0, np.empty(0, np.int64))  # an epoch, a place in it, and the rows from there on

    def read(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a step, and the epoch of each."""
        epoch, k = divmod(step, -(-self.n_rows // batch_size))
        begin, end = k * batch_size, min((k + 1) * batch_size, self.n_rows)
        known, first, rows = self._ahead
        if known != epoch or not first <= begin <= end <= first + len(rows):
            places = np.arange(begin, min(max(end, begin + AHEAD), self.n_rows))
            first, rows = begin, permute(places, self.n_rows, (self.seed, epoch))
            self._ahead = epoch, first, rows
        return rows[begin - first : end - first], np.full(end - begin, epoch)

    def seen(self, steps: int, batch_size: int) -> np.ndarray:
        """How many rows the first `steps` steps read, of each source (here there is one)."""
        epochs, k = divmod(steps, -(-self.n_rows // batch_size))
        return np.array([epochs * self.n_rows + k * batch_size])


class Micro(NamedTuple):
    """Rows of one forward. `number` counts the micro-batches of a step over all ranks; a filler carries no targets."""

    number: int
    rows: np.ndarray
    epochs: np.ndarray
    filler: bool = False


class Windows:
    """For the torch loader: from `step` to the end of its epoch, what this rank reads in each optimizer step.

    `order` says which rows a step of `batch_size` reads. Its micro-batch m belongs to rank m % world; ranks that come
    out short get a filler, since all must run the same number of forwards.
    """

    def __init__(self, order, batch_size: int, micro_batch_size: int, rank: int = 0, world: int = 1):
        self.order, self.batch_size, self.micro_batch_size = order, batch_size, micro_batch_size
        self.rank, self.world = rank, world
        self.step = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-self.order.n_rows // self.batch_size)

    def window(self, step: int) -> list[Micro]:
        """The micro-batches of this rank in a step."""
        rows, epochs = self.order.read(step, self.batch_size)
        size = self.micro_batch_size
        micros = [Micro(m, rows[begin:begin + size], epochs[begin:begin + size])
                  for m, begin in enumerate(range(0, len(rows), size))]
        while len(micros) % self.world:
            micros.append(micros[0]._replace(number=len(micros), filler=True))
        return micros[self.rank::self.world]

    def __iter__(self) -> Iterator[list[Micro]]:
        end = (self.step // len(self) + 1) * len(self)
        return map(self.window, range(self.step, end))


class Batches:
    """For validation and test: `n_rows` rows from `first` on, once and in order. Rank r reads batch r, r + world, ...

    A rank that comes out short reads a filler, since all must run the same number of forwards.
    """

    def __init__(self, n_rows: int, micro_batch_size: int, rank: int = 0, world: int = 1, first: int = 0):
        self.n_rows, self.micro_batch_size, self.rank, self.world = n_rows, micro_batch_size, rank, world
        self.first = first

    def __len__(self) -> int:
        return max(1, -(-self.n_rows // (self.micro_batch_size * self.world)))

    def __iter__(self) -> Iterator[Micro]:
        size = self.micro_batch_size
        for number in range(self.rank, len(self) * self.world, self.world):
            filler = number * size >= self.n_rows
            begin = 0 if filler else number * size
            yield self._batch(number, begin, min(begin + size, self.n_rows), filler)

    def _batch(self, number: int, begin: int, end: int, filler: bool = False) -> Micro:
        return Micro(number, self.first + np.arange(begin, end), np.zeros(end - begin, np.int64), filler)


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
