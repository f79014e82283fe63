"""Mixtures: several sources, each with a share of the rows that its weight says, in an order that is computed.

Rows come in blocks of 1024. In every block each source has the same number of rows, that of its weight (the largest
remainder decides who gets what rounding leaves); where in the block they stand is a permutation, keyed by the block's
number. So the k-th row of a source, and how many it has had by any step, follow from a block's number and one block.
A source goes through its own epochs: its k-th row is of epoch k // n, which is a permutation of its n rows.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain

import numpy as np

from ..errors import UserError
from ..tokenizer import Tokenizer
from . import preparation
from .cache import key
from .packing import JoinedRows
from .sampler import permute
from .shards import SPLITS, Joined, Split, Store
from .sources import Source

BLOCK = 1024  # rows in which the shares are exact
OF_A_SOURCE = re.compile(r"(?<![^\s(])data\.(?=(?:\w+_)?(?:path|column|fraction|field|name|config|reader)\b)")


def of_sources(config: Mapping) -> dict[str, dict]:
    """A run's configuration for each source of a mixture by itself, by name, in the order that they have throughout."""
    data, task = config["data"], config.get("task")
    shared = {word: data.get(word) for word in ("cache_dir", "processes")}
    return {name: {"data": {**node, **shared}, "task": task}
            for name, node in sorted((data.get("sources") or {}).items())}


def weights_of(sources: Mapping[str, Mapping]) -> dict[str, float]:
    """The weight of each of some sources."""
    return {name: source["data"]["weight"] for name, source in sources.items()}


def prepare(config: Mapping, tokenizer: Tokenizer, split: str | None = None,
            labels: list[str] | None = None) -> "Store | Mixture":
    """The token store of a run, as `preparation.prepare`, or those of a mixture's sources.

    Each source is a store of its own: what `deduplicate` leaves out has come before in the same source.
    """
    sources, stores = of_sources(config), {}
    if not sources:
        return preparation.prepare(config, tokenizer, split, labels)
    for name, source in sources.items():
        with naming(name):
            stores[name] = preparation.prepare(source, tokenizer, split, labels)
    return Mixture(stores, weights_of(sources))


def store_name(config: Mapping, tokenizer: Tokenizer) -> str:
    """The name of what a run trains on, as its files are now: that of the store, or of the mixture."""
    sources = of_sources(config)
    if not sources:
        return preparation.store_name(config, tokenizer)
    names = {name: preparation.store_name(source, tokenizer) for name, source in sources.items()}
    return _name(names, weights_of(sources))


def _name(stores: Mapping[str, str], weights: Mapping[str, float]) -> str:
    return key({source: [store, weights[source]] for source, store in stores.items()})


def prepare_tokenizer(config: Mapping, say: Callable[[str], object] | None = None) -> Tokenizer:
    """The tokenizer of a run, as `preparation.prepare_tokenizer`; for a mixture one, of all its sources."""
    return preparation.prepare_tokenizer(config, texts(config), say)


def texts(config: Mapping) -> "Source | Texts":
    """Where the texts of a run come from, for its tokenizer."""
    return Texts(config) if of_sources(config) else preparation.source_of(config)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Let a user's mistake say of which source it is, in the words of the command line."""
    try:
        yield
    except UserError as error:
        named = OF_A_SOURCE.sub(f"data.sources.{source}.", str(error))
        raise UserError(named if named != str(error) else f"data.sources.{source}: {error}") from None


class Texts:
    """What a tokenizer is trained on: training texts of all sources, in the proportion of their weights."""

    def __init__(self, config: Mapping):
        sources, self.sources = of_sources(config), {}
        weights = weights_of(sources)
        total = math.fsum(weights.values())
        self.shares = {name: weight / total for name, weight in weights.items()}
        for name, source in sources.items():
            with naming(name):
                self.sources[name] = preparation.source_of(source)

    def identity(self) -> dict:
        """What the texts depend on, as plain types."""
        found = {}
        for name, source in self.sources.items():
            with naming(name):
                found[name] = [self.shares[name], source.identity()]
        return found

    def sample(self, megabytes: float) -> Iterator[str]:
        """About `megabytes`, or as much less as keeps the proportion where a source has not its share of that."""
        sizes = {name: source.n_bytes / 1e6 for name, source in self.sources.items()}
        most = min([size / self.shares[name] for name, size in sizes.items() if size], default=megabytes)
        for name, source in self.sources.items():
            with naming(name):
                yield from source.sample(min(megabytes, most) * self.shares[name])

    def held_out_texts(self) -> Iterator[str]:
        """Validation texts, source after source."""
        return chain.from_iterable(source.held_out_texts() for source in self.sources.values())


class Mixture:
    """The stores of several sources as one: `mixture["train"]`, and what else a store says of itself."""

    xz_bits_per_byte = None

    def __init__(self, stores: Mapping[str, Store], weights: Mapping[str, float]):
        labels = [store.labels for store in stores.values()]
        if any(own != labels[0] for own in labels):
            union = sorted({name for own in labels for name in own or ()})
            stores = {name: Store(store.folder, union) for name, store in stores.items()}
        self.stores, self.weights = dict(stores), dict(weights)

    @property
    def name(self) -> str:
        return _name({name: store.name for name, store in self.stores.items()}, self.weights)

    @property
    def labels(self) -> list[str] | None:
        """The names of all classes, by which those of each source are numbered."""
        return next(store.labels for store in self.stores.values())

    @property
    def kind(self) -> str | None:
        """Of which kind labels are."""
        return next(store.kind for store in self.stores.values())

    @property
    def splits(self) -> list[str]:
        return [split for split in SPLITS if any(split in store.splits for store in self.stores.values())]

    def __getitem__(self, split: str) -> Joined:
        return Joined(list(self.sets(split).values()))

    def sets(self, split: str) -> dict[str, Split]:
        """What each source gives to a split: a set by its name, or, where the source names several, `SOURCE/NAME`."""
        return {f"{source}/{name}" if name else source: found for source, store in self.stores.items()
                for name, found in store.sets(split).items()}

    def require(self, tokenizer: Tokenizer) -> None:
        for store in self.stores.values():
            store.require(tokenizer)

    def verify(self) -> None:
        for store in self.stores.values():
            store.verify()


class MixedRows(JoinedRows):
    """The training rows of a mixture's sources, which are read in the proportion of their `weights`."""

    def __init__(self, mixture: Mixture, packing: str, length: int, stride: int | None):
        super().__init__(mixture.sets("train"), packing, length, stride)
        self.weights = [mixture.weights[name] for name in self.sources]

    def order(self, seed: int, by_length: bool) -> "Mixed":
        """Which rows a step of training reads; a mixture keeps its shares, whatever the lengths are."""
        return Mixed(list(map(len, self.sources.values())), self.weights, seed)

    @property
    def tokens_per_row(self) -> float:
        each = [rows.tokens_per_row for rows in self.sources.values()]
        return float(np.dot(each, apportion(self.weights, BLOCK))) / BLOCK


class Mixed:
    """The order of a mixture: sources of sizes (S,) rows by their weights (S,). All steps are full.

    An epoch is as many rows as the sources hold together, whichever they are.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        self.sizes, self.seed, self.n_rows = np.array(sizes), seed, sum(sizes)
        self.counts = apportion(weights, BLOCK)

    def read(self, step: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a step, and the epoch of each."""
        blocks, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), BLOCK)
        order = {block: self._block(block) for block in range(blocks[0], blocks[-1] + 1)}
        sources, before = np.stack([order[block] for block in order])[blocks - blocks[0], :, places].T
        epochs, numbers = np.divmod(blocks * self.counts[sources] + before, self.sizes[sources])
        rows = np.empty_like(numbers)
        for source, epoch in set(zip(sources.tolist(), epochs.tolist(), strict=True)):
            own = (sources == source) & (epochs == epoch)
            n = int(self.sizes[source])
            rows[own] = self.sizes[:source].sum() + permute(numbers[own], n, (self.seed, source, epoch))
        return rows, epochs

    def seen(self, steps: int, batch_size: int) -> np.ndarray:
        """How many rows of each source the first `steps` steps read (S,)."""
        blocks, rest = divmod(steps * batch_size, BLOCK)
        return blocks * self.counts + np.bincount(self._block(blocks)[0, :rest], minlength=len(self.counts))

    def _block(self, number: int) -> np.ndarray:
        return arrange(tuple(self.counts.tolist()), self.seed, number)


@lru_cache(maxsize=4)
def arrange(counts: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """Of each place of a block its source, and how many places of that source are before it: int64 (2, BLOCK)."""
    sources = np.repeat(np.arange(len(counts)), counts)[permute(np.arange(BLOCK), BLOCK, (seed, len(counts), block))]
    grouped = np.argsort(sources, kind="stable")
    before = np.empty(BLOCK, np.int64)
    before[grouped] = np.arange(BLOCK) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([sources, before])


def apportion(weights: Sequence[float], n: int) -> np.ndarray:
    """Whole numbers (S,) that add up to n in the proportion of weights: rounded down, then by largest remainders."""
    quotas = np.array(weights) / math.fsum(weights) * n
    counts = quotas.astype(np.int64)
    counts[np.argsort(counts - quotas, kind="stable")[:n - counts.sum()]] += 1
    return counts

