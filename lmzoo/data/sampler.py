"""The order of training: which rows an optimizer step reads, as a function of (seed, step) and nothing else.

Each epoch is a keyed permutation of the rows, computed element by element: a Feistel network (Luby and Rackoff 1988) is
a bijection on numbers of an even count of bits, and walking along its cycles until one falls below n (Black and Rogaway
2002) makes it one on 0 .. n - 1. There is no index in memory, and step 10^9 costs what step 0 costs.
Where rows are of many lengths, a stretch of that order is dealt out anew, so that a step pads little (`Alike`).
"""

from collections.abc import Callable, Iterator
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


class Alike(Shuffled):
    """The same order, but the rows of a step are of like length: those of a stretch of steps are sorted by length, cut
    into as many steps, and these shuffled. What is left for an epoch's last step stays.

    A stretch has at most 1024 rows, and an eighth of an epoch: so an epoch brings together other rows than the last.
    """

    def __init__(self, n_rows: int, seed: int, lengths: Callable[[np.ndarray], np.ndarray]):
        super().__init__(n_rows, seed)
        self.lengths = lengths
        self._dealt = (None, np.empty((0, 0), np.int64))  # a stretch, and the rows of each of its steps

    def read(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        n_full = self.n_rows // batch_size
        epoch, k = divmod(step, -(-self.n_rows // batch_size))
        n = max(1, min(AHEAD // batch_size, n_full // 8))
        begin, end = k // n * n, min(k // n * n + n, n_full)
        if n == 1 or k >= end:
            return super().read(step, batch_size)
        if self._dealt[0] != (stretch := (epoch, begin, batch_size)):
            rows = np.concatenate([super(Alike, self).read(step - k + one, batch_size)[0] for one in range(begin, end)])
            rows = rows[np.argsort(self.lengths(rows), kind="stable")].reshape(-1, batch_size)
            self._dealt = stretch, rows[permute(np.arange(len(rows)), len(rows), (self.seed, epoch, begin))]
        return self._dealt[1][k - begin], np.full(batch_size, epoch)


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
    """For validation and test: each of `rows` (n,) once and in order. Rank r reads batch r, r + world, ...

    A rank that comes out short reads a filler, since all must run the same number of forwards.
    """

    def __init__(self, rows: np.ndarray, micro_batch_size: int, rank: int = 0, world: int = 1):
        self.rows, self.micro_batch_size, self.rank, self.world = rows, micro_batch_size, rank, world

    def __len__(self) -> int:
        return max(1, -(-len(self.rows) // (self.micro_batch_size * self.world)))

    def __iter__(self) -> Iterator[Micro]:
        size = self.micro_batch_size
        for number in range(self.rank, len(self) * self.world, self.world):
            filler = number * size >= len(self.rows)
            rows = self.rows[0 if filler else number * size :][:size]
            yield Micro(number, rows, np.zeros(len(rows), np.int64), filler)


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
