"""What a user sees while a run goes on."""

import sys
import time
from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from .steps import last_step, total_steps


class Progress(TQDMProgressBar):
    """One bar over all steps of the run, with the loss, tokens per second and the time that is left.

    Where the output is no terminal, a line every `seconds` takes the bar's place.
    """

    def __init__(self, seconds: float = 10.0):
        super().__init__()
        self.seconds = seconds
        self.shown: dict[str, str] = {}

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        super().setup(trainer, task, stage)
        self.lines = trainer.is_global_zero and not sys.stdout.isatty()
        if self.lines:
            self.disable()

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.total = total_steps(trainer)
        self.first = trainer.global_step
        self.tokens = 0
        self.started = self.printed = time.perf_counter()
        self.train_progress_bar = Tqdm(
            desc="training", total=self.total, initial=self.first, disable=self.is_disabled, file=sys.stdout,
            dynamic_ncols=True, smoothing=0,
            bar_format="{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} steps, {remaining} left{postfix}",
        )  # fmt: skip

    def on_train_epoch_start(self, *_: object) -> None:
        """The bar spans all epochs."""

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Mapping, *_: object) -> None:
        self.tokens += int(outputs["tokens"])
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.global_step == 1 or last_step(trainer):
            self.shown["loss"] = f"{float(outputs['loss']):.3f}"
        elapsed = time.perf_counter() - self.started
        self.shown["tokens/s"] = f"{self.tokens / elapsed:,.0f}"
        self.train_progress_bar.set_postfix(self.shown, refresh=False)
        self.train_progress_bar.update(1)
        if self.lines and (last_step(trainer) or time.perf_counter() - self.printed > self.seconds):
            self.printed = time.perf_counter()
            print(self.line(trainer.global_step, elapsed), flush=True)

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        super().on_validation_end(trainer, task)
        if "val/loss" in trainer.callback_metrics:
            self.shown["val"] = f"{float(trainer.callback_metrics['val/loss']):.3f}"

    def on_train_epoch_end(self, *_: object) -> None:
        """The bar spans all epochs."""

    def get_metrics(self, *_: object) -> dict[str, str]:
        return self.shown

    def line(self, step: int, elapsed: float) -> str:
        """`step 120/1000  loss 4.321  tokens/s 12,345  1:02 left`, from the seconds that the steps so far took."""
        parts = [f"step {step}" + (f"/{self.total}" if self.total else "")]
        parts += [f"{name} {value}" for name, value in self.shown.items()]
        if self.total:
            seconds = round(elapsed / (step - self.first) * (self.total - step))
            parts.append(Tqdm.format_interval(seconds) + " left")
        return "  ".join(parts)
