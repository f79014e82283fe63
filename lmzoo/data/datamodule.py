"""Loaders for Lightning. One item of the train loader is one optimizer step: a window, the list of its micro-batches.

So everything that Lightning counts is optimizer steps, no checkpoint can fall inside a step, and the position of the
loader is one number. Rows come straight from the memory map, in the training process unless workers are asked for.
"""

from collections.abc import Mapping

import numpy as np
from lightning import LightningDataModule

from ..errors import UserError
from ..tokenizer import Tokenizer
from .few import Few
from .loader import Collated, Loader, RowLoader
from .mixture import Mixed, MixedRows, Mixture
from .packing import JoinedRows, Rows
from .sampler import Batches, Micro, Shuffled, Windows, split_batch
from .shards import Store


class DataModule(LightningDataModule):
    """The loaders of a store, or of a mixture of stores, for one task.

    `collator(examples) -> batch` makes tensors of rows, and `collator.window(row_length) -> (length, stride)` says how
    long rows are and by how much they advance (stride None: a row is a document). `collator.tell(labels)`,
    where there is one, hears the names of the classes first. `config` is the node `data`.
    Under a trainer its ranks share the work; changing their number changes nothing else. `limits` says of how many
    batches (of `batch_size` rows) the evaluation of a split is, where not of all.
    """

    def __init__(self, store: Store | Mixture, tokenizer: Tokenizer, collator, config: Mapping, seed: int,
                 limits: Mapping[str, int | None] | None = None):
        super().__init__()
        store.require(tokenizer)
        self.store, self.tokenizer, self.collator, self.seed = store, tokenizer, collator, seed
        self.limits = limits or {}
        self.by_length = config.get("group_by_length", True)
        self.batch_size, self.num_workers = config["batch_size"], config.get("num_workers") or 0
        self._micro_batch_size = config.get("micro_batch_size")
        self.automatic, self.decided = self._micro_batch_size == "auto", None
        if self.automatic:
            self._micro_batch_size = None
        split_batch(self.batch_size, self._micro_batch_size, 1)  # refuse a pair that does not divide before any work
        length, stride = collator.window(config["row_length"])
        shape = config["packing"], length, stride
        few = config.get("per_class") and (config["per_class"], seed)
        self.rows = {split: _rows(store, split, *shape, few if split == "train" else None) for split in store.splits}
        for name, rows in self.rows["train"].sources.items() if "train" in self.rows else ():
            if not len(rows) or rows.packing in ("stream", "isolate") and rows.split.n_tokens < length:
                raise UserError("the training text" + (f" of data.sources.{name}" if name else "") +
                                f" has {rows.split.n_tokens} tokens, not enough for one row of {length}: "
                                "give more text (data.path) or a smaller data.row_length")
        self.labels, self.xz_bits_per_byte = store.labels, store.xz_bits_per_byte
        if hasattr(collator, "tell"):
            collator.tell(store.labels)

    def n_rows(self, split: str) -> int:
        """Rows of a split, or of a source or a named set of it, as "val/wiki"; 0, as for the numbers below, if the data
        has no such."""
        return sum(map(len, self._sources(split).values()))

    def n_evaluated(self, split: str) -> int:
        """Those that its evaluation reads."""
        return sum(self._evaluated(split).values())

    def _sources(self, split: str) -> dict[str | None, Rows]:
        split, _, name = split.partition("/")
        sources = self.rows[split].sources if split in self.rows else {}
        return {one: rows for one, rows in sources.items() if not name or f"{one}/".startswith(f"{name}/")}

    def _evaluated(self, split: str) -> dict[str | None, int]:
        """How many rows of each source of a split its evaluation reads."""
        sources, limit = self._sources(split), self.limits.get(split.partition("/")[0])
        return {name: min(len(rows), limit * self.batch_size) if limit else len(rows) for name, rows in sources.items()}

    def evaluated(self, split: str) -> list[str | None]:
        """The sources and named sets whose metrics an evaluation tells apart, in the order of its loaders; one, None,
        where there are no such."""
        return list(self._evaluated(split))

    def n_tokens(self, split: str) -> int:
        """All tokens of a split, bos and eos included."""
        return sum(rows.split.n_tokens for rows in self._sources(split).values())

    def n_bytes(self, split: str) -> int:
        """UTF-8 bytes of the raw text of a split."""
        return sum(rows.split.n_bytes for rows in self._sources(split).values())

    @property
    def steps_per_epoch(self) -> int:
        return len(self._windows(0, 1))

    @property
    def tokens_per_step(self) -> int:
        """Tokens by which a full step advances through the corpus (where rows are of many lengths, on average)."""
        return round(self.batch_size * self.rows["train"].tokens_per_row)

    @property
    def _order(self) -> Shuffled | Mixed:
        return self.rows["train"].order(self.seed, self.by_length)

    def seen(self, steps: int) -> dict[str, int]:
        """How many rows of each source of a mixture the first `steps` steps read; of other data nothing is said."""
        seen = zip(self.rows["train"].sources, self._order.seen(steps, self.batch_size).tolist(), strict=True)
        return {name: n for name, n in seen if name}

    def sources(self, first_step: int, steps: int) -> dict[str, tuple[int, int]]:
        """Of each source of a mixture, how many rows are read from `first_step` to `steps`, and how many there are."""
        before, seen = self.seen(first_step), self.seen(steps)
        return {name: (n - before[name], len(self.rows["train"].sources[name])) for name, n in seen.items()}

    @property
    def lost(self) -> tuple[int, int, int]:
        """Training tokens that no row holds, positions of full rows that hold none, and both with all that is read."""
        rows = self.rows["train"]
        return rows.n_cut, rows.n_padding, rows.n_cut + rows.n_padding + rows.n_inputs

    def rows_read(self, steps: int) -> int:
        """Rows that the first `steps` steps read: an epoch's last step reads what is left of it."""
        return int(self._order.seen(steps, self.batch_size).sum())

    def tokens_read(self, steps: int) -> int:
        """Tokens of those rows: exact over whole epochs, else by the mean row."""
        seen = zip(self.rows["train"].sources.values(), self._order.seen(steps, self.batch_size), strict=True)
        return round(sum(n * rows.n_inputs / len(rows) for rows, n in seen))

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward on one device."""
        return split_batch(self.batch_size, self.decided or self._micro_batch_size, self._ranks[1])

    @property
    def undecided(self) -> bool:
        """Whether the rows of a forward are still to be found by trying, and said as `decided`."""
        return self.automatic and self.decided is None

    def state_dict(self) -> dict[str, int]:
        return {"decided": self.decided} if self.decided else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.decided = state["decided"]  # another number of rows would be another run

    def longest(self, n: int) -> dict:
        """A batch of n rows as long as any in training: of rows that join documents, as any of the first hundred."""
        rows, place, most, before = self.rows["train"], 0, 0, 0
        first = (np.array([len(rows[row]["tokens"])]) for row in range(min(100, len(rows))))
        for lengths in rows.split.lengths() if rows.packing == "single" else first:
            if lengths.max() > most:
                place, most = before + int(lengths.argmax()), lengths.max()
            before += len(lengths)
        return self._dataset("train").batch(Micro(0, np.full(n, place), np.zeros(n, np.int64)))

    @property
    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _windows(self, rank: int, world: int) -> Windows:
        return Windows(self._order, self.batch_size, self.micro_batch_size, rank, world)

    def _dataset(self, split: str) -> Collated:
        return Collated(self.rows[split], self.collator, self.seed)

    def train_dataloader(self) -> Loader:
        return Loader(self._dataset("train"), self._windows(*self._ranks), self.num_workers)

    def val_dataloader(self) -> RowLoader | list:
        return self._evaluation("val")

    def test_dataloader(self) -> RowLoader | list:
        return self._evaluation("test")

    def _evaluation(self, split: str) -> RowLoader | list:
        loaders, first = [], 0
        for name, n in self._evaluated(split).items():
            rows = self.rows[split].sources[name]
            order = first + (np.argsort(rows.lengths(np.arange(n)), kind="stable") if rows.unequal else np.arange(n))
            batches = Batches(order, self.micro_batch_size, *self._ranks)
            loaders.append(RowLoader(self._dataset(split), batches, self.num_workers))
            first += len(rows)
        return loaders[0] if len(loaders) == 1 else loaders


def _rows(store: Store | Mixture, split: str, packing: str, length: int, stride: int | None,
          few: tuple[int, int] | None) -> Rows | JoinedRows:
    if split == "train" and isinstance(store, Mixture):
        return MixedRows(store, packing, length, stride)
    sets = store.sets(split)
    if few:
        sets = {name: Few(own, *few) for name, own in sets.items()}
    return Rows(sets[None], packing, length, stride) if [*sets] == [None] else JoinedRows(sets, packing, length, stride)
