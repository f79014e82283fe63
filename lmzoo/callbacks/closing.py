"""What belongs to a run's beginning and end."""

from lightning.pytorch import Callback, Trainer

from .steps import last_step


class FirstValidation(Callback):
    """Validates before the first step where that is `wanted`: the row of step 0."""

    def __init__(self, wanted: bool = False):
        self.wanted = wanted

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        if self.wanted and trainer.enable_validation and not trainer.ckpt_path:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True


class LastValidation(Callback):
    """Validates after the last step, whatever the interval: a run that is asked to stop is validated once more."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if last_step(trainer):
            trainer.should_stop = True
