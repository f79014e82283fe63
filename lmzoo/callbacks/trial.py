"""How many rows fit in a device's memory: found by trying, before the first step."""

import gc
from contextlib import nullcontext

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ..errors import UserError


class LargestMicroBatch(Callback):
    """For `data.micro_batch_size=auto`: runs the longest rows forward and backward, as many as a device has of a step,
    then half as many, until they fit on every rank. Weights and random numbers stay as they are.
    """

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        data = trainer.datamodule
        if not data.undecided:
            return
        size = data.micro_batch_size
        while not trainer.strategy.reduce_boolean_decision(fits(trainer, task, size)):
            gc.collect()
            torch.cuda.empty_cache()
            if size == 1:
                raise UserError("data.micro_batch_size=auto: not one row fits in memory; "
                                "take a smaller model or data.row_length")  # fmt: skip
            size = max(n for n in range(1, size // 2 + 1) if data.batch_size % n == 0)
        data.decided = size
        if trainer.is_global_zero:
            print(f"data.micro_batch_size=auto: {size} rows a forward", flush=True)


def fits(trainer: Trainer, task: LightningModule, size: int) -> bool:
    """Whether a forward and a backward of `size` rows fit on this rank, beside what the optimizer will keep."""
    devices = [task.device] if task.device.type == "cuda" else []
    alone = trainer.strategy.block_backward_sync() if trainer.world_size > 1 else nullcontext()
    try:
        with torch.random.fork_rng(devices), alone, trainer.precision_plugin.train_step_context():
            moments = [torch.empty_like(weight) for weight in task.parameters() for _ in range(2)]
            batch = trainer.strategy.batch_to_device(trainer.datamodule.longest(size), task.device)
            task.micro_loss(batch, step=0).backward()
            del moments
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        task.zero_grad()
    return True


def out_of_memory(error: Exception) -> bool:
    """Whether this is a device's, or torch's or Python's way to say so of a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
