"""Loaders for Lightning. One item of the train loader is one optimizer step: a window, the list of its micro-batches.

So everything that Lightning counts is optimizer steps, no checkpoint can fall inside a step, and the position of the
loader is one number. Rows come straight from the memory map, in the training process unless workers are asked for.
"""

from collections.abc import Mapping

from lightning import LightningDataModule

from ..errors import UserError
from ..tokenizer import Tokenizer
from .loader import Collated, Loader, RowLoader
from .packing import Rows
from .sampler import Batches, Windows, split_batch
from .shards import Store


class DataModule(LightningDataModule):
    """The loaders of a store for one task.

    `collator(examples) -> batch` makes tensors of rows, and `collator.window(row_length) -> (length, stride)` says how
    long rows are and by how much they advance (stride None: a row is a document). `config` is the node `data`.
    Under a trainer its ranks share the work; changing their number changes nothing else.
    """

    def __init__(self, store: Store, tokenizer: Tokenizer, collator, config: Mapping, seed: int):
        super().__init__()
        store.require(tokenizer)
        self.store, self.tokenizer, self.collator, self.seed = store, tokenizer, collator, seed
        self.batch_size, self.num_workers = config["batch_size"], config.get("num_workers") or 0
        self._micro_batch_size = config.get("micro_batch_size")
        split_batch(self.batch_size, self._micro_batch_size, 1)  # refuse a pair that does not divide before any work
        length, self.stride = collator.window(config["row_length"])
        self.rows = {name: Rows(store[name], config["packing"], length, self.stride) for name in store.splits}
        train = self.rows.get("train")
        if train is not None and train.packing != "single" and train.split.n_tokens < length:
            raise UserError(f"the training text has {train.split.n_tokens} tokens, not enough for one row of {length}: "
                            "give more text (data.path) or a smaller data.row_length")
        self.labels, self.xz_bits_per_byte = store.labels, store.xz_bits_per_byte

    def n_rows(self, split: str) -> int:
        """Rows of a split; 0, as for the numbers below, if the data has no such split."""
        return len(self.rows[split]) if split in self.rows else 0

    def n_tokens(self, split: str) -> int:
        """All tokens of a split, bos and eos included."""
        return self.store[split].n_tokens if split in self.rows else 0

    def n_bytes(self, split: str) -> int:
        """UTF-8 bytes of the raw text of a split."""
        return self.store[split].n_bytes if split in self.rows else 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self._windows(0, 1))

    @property
    def tokens_per_step(self) -> int:
        """Tokens by which a full step advances through the corpus (with packing `single`, on average)."""
        rows = self.rows["train"]
        if rows.packing != "single":
            return self.batch_size * self.stride
        return round(self.batch_size * (rows.split.n_tokens - rows.n_cut) / len(rows))

    @property
    def micro_batch_size(self) -> int:
        """Rows of one forward on one device."""
        return split_batch(self.batch_size, self._micro_batch_size, self._ranks[1])

    @property
    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _windows(self, rank: int, world: int) -> Windows:
        return Windows(self.n_rows("train"), self.batch_size, self.micro_batch_size, self.seed, rank, world)

    def _dataset(self, split: str) -> Collated:
        return Collated(self.rows[split], self.collator, self.seed)

    def train_dataloader(self) -> Loader:
        return Loader(self._dataset("train"), self._windows(*self._ranks), self.num_workers)

    def val_dataloader(self) -> RowLoader | list:
        return self._evaluation("val")

    def test_dataloader(self) -> RowLoader | list:
        return self._evaluation("test")

    def _evaluation(self, split: str) -> RowLoader | list:
        if split not in self.rows:
            return []
        batches = Batches(self.n_rows(split), self.micro_batch_size, *self._ranks)
        return RowLoader(self._dataset(split), batches, self.num_workers)
