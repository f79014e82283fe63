"""What belongs to the end of a run."""

from lightning.pytorch import Callback, Trainer

from .steps import last_step


class LastValidation(Callback):
    """Validates after the last step, whatever the interval: a run that is asked to stop is validated once more."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if last_step(trainer):
            trainer.should_stop = True
