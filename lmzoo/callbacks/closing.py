"""What belongs to a run's beginning and end."""

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.loops.fit_loop import _FitLoop

from ..errors import UserError
from .saving import lower_is_better
from .steps import last_step, validate


class FirstValidation(Callback):
    """Validates before the first step where that is `wanted`: the row of step 0."""

    def __init__(self, wanted: bool = False):
        self.wanted = wanted

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        if self.wanted and not trainer.ckpt_path:
            validate(trainer)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's: ends the run after `patience` validations in a row whose `monitor` was not better than the best.

    A run that goes on counts those before, against its own patience.
    """

    def __init__(self, monitor: str, patience: int):
        mode = "min" if lower_is_better(monitor) else "max"
        super().__init__(monitor, patience=patience, mode=mode, strict=False,  # some metrics are not always defined
                         check_finite=False, check_on_train_epoch_end=False)

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        if self.monitor not in (known := task.measured()):
            listed = ", ".join(sorted(known)) or "no metrics"
            raise UserError(f"trainer.patience={self.patience} waits for checkpoint.monitor={self.monitor}, "
                            f"but validation has {listed}")

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    @property
    def exhausted(self) -> bool:
        return self.wait_count >= self.patience


class LastValidation(Callback):
    """Validates after the last step, whatever the interval: a run that is asked to stop is validated once more."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if last_step(trainer):
            trainer.should_stop = True


class Ended(_FitLoop):
    """The loop of a run that has taken all its steps: it begins and ends, where Lightning's own would do neither."""

    skip = False

    @staticmethod
    def of(trainer: Trainer) -> None:
        """Make it the trainer's."""
        trainer.fit_loop.__class__ = Ended
