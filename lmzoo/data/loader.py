"""The torch side of loading: row numbers become the task's batches, in this process or in workers; steps are counted.

A worker process imports this file and no more of the training code, so that it starts quickly.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import UserError
from .packing import Rows
from .sampler import Batches, Micro, Windows

IGNORED = -100
Batch = dict[str, Any]


class Collated(Dataset):
    """From the rows of a micro-batch to a batch, or from those of a window to its batches."""

    def __init__(self, rows: Rows, collator: Callable[[list[dict]], Batch], seed: int):
        self.rows, self.collator, self.seed = rows, collator, seed

    def __getitem__(self, item: Micro | list[Micro]) -> Batch | list[Batch]:
        return self.batch(item) if isinstance(item, Micro) else [self.batch(micro) for micro in item]

    def batch(self, micro: Micro) -> Batch:
        """Tensors of one micro-batch, and its number as `micro`."""
        batch = self.collator([self.rows[row] | {"key": (self.seed, epoch, row)}
                               for row, epoch in zip(micro.rows.tolist(), micro.epochs.tolist(), strict=True)])
        if micro.filler:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch | {"micro": micro.number}


def unchanged(batch):
    """In place of torch's conversion, which would turn tuples into lists."""
    return batch


class RowLoader(DataLoader):
    """Batches of rows in the order of `order`."""

    def __init__(self, dataset: Collated, order: Windows | Batches, num_workers: int = 0, **settings):
        # A generator of its own: without one, starting a loader draws from torch's global random numbers.
        super().__init__(dataset, sampler=order, batch_size=None, num_workers=num_workers, collate_fn=unchanged,
                         generator=torch.Generator(), pin_memory=torch.cuda.is_available(), **settings)


class Loader(RowLoader):
    """The train loader. Its state is the number of steps that it has handed out (workers run ahead of that)."""

    waited = 0.0  # seconds for which the training process has waited for windows

    def __iter__(self):
        step, asked = self.sampler.step, time.perf_counter()
        for window in super().__iter__():
            self.waited += time.perf_counter() - asked
            step += 1
            self.sampler.step = step
            yield window
            asked = time.perf_counter()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.sampler.step, "batch_size": self.sampler.batch_size, "n_rows": self.sampler.order.n_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a step. Raises `UserError` if steps mean other rows now than when the state was saved."""
        for word, now in self.state_dict().items():
            if word != "step" and state.get(word, now) != now:
                raise UserError(f"cannot resume: the checkpoint was made with {word}={state[word]}, this run has {now}")
        self.sampler.step = state["step"]
