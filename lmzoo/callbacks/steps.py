"""Questions about the step that has just been taken which more than one callback asks."""

from lightning.pytorch import Trainer


def validation_due(trainer: Trainer) -> bool:
    """Whether validation follows this step: the training loop's own answer, asked in `on_train_batch_end`."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def last_step(trainer: Trainer) -> bool:
    """Whether training ends with this step, as far as steps, epochs and `should_stop` tell."""
    last_of_epochs = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.global_step == trainer.max_steps or last_of_epochs or trainer.should_stop


def total_steps(trainer: Trainer) -> int | None:
    """Optimizer steps of the whole run; None where neither steps nor epochs bound it."""
    bounds = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    return min(bounds, default=None)
