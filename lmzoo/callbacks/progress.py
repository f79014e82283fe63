"""What a user sees while a run goes on."""

import sys
import time
from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from .steps import Losses, last_step, validation_due


class Progress(TQDMProgressBar):
    """One bar over all steps of the run, with the loss, tokens per second and the time that is left.

    The loss is the mean over all targets since it was shown before. Where the output is no terminal, a line every
    `seconds` takes the bar's place.
    """

    def __init__(self, seconds: float = 10.0):
        super().__init__()
        self.seconds = seconds
        self.losses = Losses()
        self.shown: dict[str, str] = {}
        self.val: dict[str, str] = {}

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        super().setup(trainer, task, stage)
        self.lines = trainer.is_global_zero and not sys.stdout.isatty()
        if self.lines:
            self.disable()

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.total = trainer.max_steps
        self.first = trainer.global_step
        self.tokens = 0
        self.started = self.printed = time.perf_counter()
        self.train_progress_bar = self._bar("training", "steps", self.total, initial=self.first)

    def _bar(self, desc: str, unit: str, total: int, **words: object) -> Tqdm:
        shape = "{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {unit}, {remaining} left{postfix}"
        return Tqdm(desc=desc, unit=unit, total=total, bar_format=shape, disable=self.is_disabled, file=sys.stdout,
                    dynamic_ncols=True, smoothing=0, **words)  # fmt: skip

    def on_train_epoch_start(self, *_: object) -> None:
        """The bar spans all epochs."""

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Mapping, *_: object) -> None:
        if not trainer.is_global_zero:
            return
        self.tokens += int(outputs["tokens"])
        self.losses.add(outputs)
        step, now = trainer.global_step, time.perf_counter()
        if self.lines:
            due = now - self.printed > self.seconds
        else:
            due = step % trainer.log_every_n_steps == 0 or step == self.first + 1
        if due or last_step(trainer):
            elapsed, self.printed = now - self.started, now
            self.shown = {"loss": f"{self.losses.read():.3f}", "tokens/s": f"{self.tokens / elapsed:,.0f}"} | self.val
            self.train_progress_bar.set_postfix(self.shown, refresh=False)
            if self.lines and not (last_step(trainer) and validation_due(trainer)):  # which has the last word
                print(self.line(step, elapsed), flush=True)
        self.train_progress_bar.update(1)

    def init_validation_tqdm(self) -> Tqdm:
        return self._bar("validation", "batches", sum(self.trainer.num_val_batches), leave=False)

    def init_test_tqdm(self) -> Tqdm:
        return self._bar("test", "batches", sum(self.trainer.num_test_batches), leave=False)

    def on_validation_batch_start(self, *_: object) -> None:
        """The bar knows its length already."""

    on_test_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, task: LightningModule) -> None:
        super().on_validation_end(trainer, task)
        if "val/loss" in trainer.callback_metrics:
            self.val = {"val": f"{float(trainer.callback_metrics['val/loss']):.3f}"}
            self.shown |= self.val
        if self.lines and trainer.state.fn == "fit" and last_step(trainer):
            print(self.line(trainer.global_step, self.printed - self.started), flush=True)

    def on_train_epoch_end(self, *_: object) -> None:
        """The bar spans all epochs."""

    def get_metrics(self, *_: object) -> dict[str, str]:
        return self.shown

    def line(self, step: int, elapsed: float) -> str:
        """`step 120/1000  loss 4.321  tokens/s 12,345  1:02 left`, from the seconds that the steps so far took."""
        seconds = round(elapsed / max(1, step - self.first) * (self.total - step))
        shown = [f"{name} {value}" for name, value in self.shown.items()]
        return "  ".join([f"step {step}/{self.total}", *shown, f"{Tqdm.format_interval(seconds)} left"])
