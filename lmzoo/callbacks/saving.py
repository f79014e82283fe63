"""Checkpoints between steps, whole at every moment; a run that is asked to go leaves one and says so."""

import re
import signal
import threading
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from ..checkpoint import link, names, read, remove, write
from .steps import last_step, validation_due


class AtomicIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints through `lmzoo.checkpoint`: one move, sha256, plain types only."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: object = None) -> None:
        write(checkpoint, path)

    def load_checkpoint(self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = True) -> dict:
        return read(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)


class Checkpoints(Checkpoint):
    """`step-000100.ckpt` every so many steps and at the end, `last.ckpt` for the newest, `best-000100-2.34567.ckpt`.

    A step where validation is due is saved after it, so that the resumed run has the metric too. A best file holds
    the weights that gave the `monitor` in its name (lower is better). `last` and `best` are further names of one file.

    Args:
        folder: where they go.
        every_n_steps: interval in optimizer steps; None: at the end only.
        keep_last: how many of the newest `step-` files stay.
        keep_best: how many of the best stay.
        monitor: the metric of validation, lower is better.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int | None = None,
        keep_last: int = 1,
        keep_best: int = 1,
        monitor: str = "val/loss",
    ):
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        stopping = trainer.should_stop  # someone may be about to kill the run: save now, and again after validation
        if self._due(trainer) and (stopping or not validation_due(trainer)):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = trainer.callback_metrics.get(self.monitor)
        best = score is not None and self._is_best(trainer, float(score))
        if best or self._due(trainer):
            self.save(trainer, float(score) if best else None)

    def save(self, trainer: Trainer, score: float | None = None) -> None:
        """Writes this step's file under its names, the best's where a `score` is given; to be called on all ranks."""
        step = trainer.global_step
        own = [f"step-{step:06d}.ckpt"] if self._due(trainer) else []
        own += [] if score is None else [f"best-{step:06d}-{score:.6g}.ckpt"]
        trainer.save_checkpoint(self.folder / own[0], weights_only=False)
        if trainer.is_global_zero:
            for name in [*own[1:], "last.ckpt"]:
                link(self.folder / own[0], name)
            self._prune()
        trainer.strategy.barrier("lmzoo.Checkpoints.save")

    def _due(self, trainer: Trainer) -> bool:
        return last_step(trainer) or bool(self.every_n_steps) and trainer.global_step % self.every_n_steps == 0

    def _is_best(self, trainer: Trainer, score: float) -> bool:
        """Rank 0's answer, since it alone need see the folder."""
        kept = self._best()[: self.keep_best]
        best = self.keep_best > 0 and (len(kept) < self.keep_best or score < _score(kept[-1])) and score == score
        return trainer.strategy.broadcast(best)

    def _best(self) -> list[str]:
        """Names of the best files, best first."""
        return sorted((name for name in names(self.folder) if name.startswith("best-")), key=_score)

    def _prune(self) -> None:
        steps = [name for name in names(self.folder) if name.startswith("step-")]
        for name in steps[: len(steps) - self.keep_last] + self._best()[self.keep_best :]:
            remove(self.folder / name)


def _score(name: str) -> float:
    return float(re.fullmatch(r"best-\d+-(.+)\.ckpt", name)[1])


class Preemption(Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C the step is finished and saved, then training stops; `preempted` tells the command
    to exit with `exit_code`, so that a scheduler runs it again. A signal to any one rank is enough.
    """

    exit_code = 75  # EX_TEMPFAIL

    def __init__(self):
        self.preempted = False
        self._asked = False
        self._earlier: dict[int, object] = {}

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python takes signal handlers from the main thread only
        for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
            if number := getattr(signal, name, None):
                self._earlier[number] = signal.signal(number, self._ask)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        asked = torch.tensor(float(self._asked), device=trainer.strategy.root_device)
        if not trainer.strategy.reduce(asked, reduce_op="sum") > 0:
            return
        if not validation_due(trainer):
            trainer.limit_val_batches = 0  # stopping would bring on a validation that the whole run does not have
        self.preempted = True
        trainer.should_stop = True

    def on_train_end(self, *_: object) -> None:
        self._restore()

    def on_exception(self, *_: object) -> None:
        self._restore()

    def _ask(self, number: int, *_: object) -> None:
        self._asked = True
        if number == signal.SIGINT:  # a second Ctrl-C does not wait
            signal.signal(number, self._earlier.pop(number))

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()
