"""What more than one callback asks about the step that has just been taken, and keeps of those before."""

import math
from collections.abc import Mapping

from lightning.pytorch import Trainer
from torch import Tensor


class Losses:
    """The losses of the steps since they were last read; they stay on their device until then."""

    def __init__(self):
        self.steps: list[tuple[Tensor | float, int]] = []  # (mean over a step's targets, their number)

    def add(self, outputs: Mapping) -> None:
        """Take in what a training step returned."""
        self.steps.append((outputs["loss"], int(outputs["targets"])))

    def read(self) -> float:
        """The mean over all targets of the steps so far, which are then forgotten; of none it is no number."""
        total, targets = sum(loss * n for loss, n in self.plain()), sum(n for _, n in self.steps)
        self.steps.clear()
        return total / targets if targets else math.nan

    def plain(self) -> list[tuple[float, int]]:
        """The steps as plain numbers, for a checkpoint."""
        return [(float(loss), n) for loss, n in self.steps]


def validation_due(trainer: Trainer) -> bool:
    """Whether validation follows this step: the training loop's own answer, asked in `on_train_batch_end`."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def validate(trainer: Trainer) -> None:
    """Validate ahead of the next step, to be called in `on_train_start`."""
    if trainer.enable_validation:
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False  # else the batches of the validation before it count as done
        trainer.validating = True
        loop.run()
        trainer.training = True


def last_step(trainer: Trainer) -> bool:
    """Whether training ends with this step, as far as `max_steps` and `should_stop` tell."""
    return trainer.global_step == trainer.max_steps or trainer.should_stop
