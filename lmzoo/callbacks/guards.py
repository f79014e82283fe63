"""What keeps a run from going on with numbers that are no numbers."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from ..checkpoint import find, names
from ..errors import Diverged


class Guard(Callback):
    """Says where a step that the task gave up (`nonfinite` in its outputs) began to be not finite; stops the run after
    `stop_after` of them in a row (None: never), naming the newest whole checkpoint of `folder`. Nor does a run end well
    of which no step was finite, however short.

    The place is found by running the step's micro-batches once more, which costs nothing while all is well.
    """

    def __init__(self, folder: str | Path, stop_after: int | None = None):
        self.folder = Path(folder)
        self.stop_after = stop_after
        self.in_a_row = 0

    def state_dict(self) -> dict:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict) -> None:
        self.in_a_row = state_dict["in_a_row"]

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.first = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, task: LightningModule, outputs: dict, window: Sequence[dict], *_: object
    ) -> None:
        if "nonfinite" not in outputs:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        step = trainer.global_step
        places = of_all_ranks(first_place(trainer, task, window, step - 1))
        weights = outputs["nonfinite"]
        of_gradient = f"the gradient of {weights[-1]}" if weights else "the gradient's norm, which overflows"
        place = next(filter(None, places), of_gradient)
        rank_zero_warn(f"step {step} was skipped: its loss or gradient is not finite, first in {place}")
        none_was_finite = step == trainer.max_steps and self.in_a_row >= step - self.first
        if none_was_finite or self.stop_after and self.in_a_row >= self.stop_after:
            if not trainer.is_global_zero:
                raise SystemExit(0)  # any other code, and Lightning kills the first rank before it has spoken
            good = f"the last good checkpoint is {find(self.folder)}" if names(self.folder) else "nothing was saved yet"
            raise Diverged(f"{self.in_a_row} steps in a row were not finite, the last in {place}: {good}; a lower "
                           "optim.lr, a longer warmup or optim.clip_norm=1 is what mostly helps")  # fmt: skip


@torch.no_grad()
def first_place(trainer: Trainer, task: LightningModule, window: Sequence[dict], step: int) -> str | None:
    """The first module, in the order of running, whose output is not finite in a micro-batch of this rank's window."""
    found: list[str] = []

    def look(name: str, micro: dict):
        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(f"{name} on rank {trainer.global_rank}, micro-batch {micro['micro']}")

        return hook

    for micro in window:
        hooks = [module.register_forward_hook(look(name, micro)) for name, module in task.net.named_modules() if name]
        with torch.compiler.set_stance("force_eager"), trainer.precision_plugin.train_step_context():
            loss = task.micro_loss(micro, step)
        for hook in hooks:
            hook.remove()
        if not loss.isfinite():
            found.append(f"the loss on rank {trainer.global_rank}, micro-batch {micro['micro']}")
    return next(iter(found), None)


def of_all_ranks(said: object) -> list:
    """What each rank says, to be called on all."""
    if not dist.is_initialized():
        return [said]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found
