"""Checkpoints between steps, whole at every moment; a run that is asked to go leaves one and says so."""

import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint import CheckpointException

from ..checkpoint import link, names, read, remove, write, write_shares
from ..errors import STOPPED, UserError
from .steps import last_step, validate, validation_due

EARLIER = ("there is none yet", "the earlier ones stay")
ALWAYS = "val/loss"  # the metric that every task has
LOWER_IS_BETTER = re.compile("loss|perplexity|bits|error|mae$|rmse$")


def lower_is_better(metric: str) -> bool:
    """Whether the less of a metric is better, as of a loss, perplexity, error or bits, whatever the set is called."""
    return bool(LOWER_IS_BETTER.search(metric.rpartition("/")[2]))


class AtomicIO(TorchCheckpointIO):
    """Lightning's reading and writing of checkpoints through `lmzoo.checkpoint`: one move, sha256, plain types only.

    `sharded`: all ranks write, each its share. A disk that refuses is no error here, but is left in `failure`.
    """

    def __init__(self, sharded: bool = False):
        self.sharded = sharded
        self.failure = ""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options: object = None) -> None:
        self.failure = ""
        try:
            (write_shares if self.sharded else write)(checkpoint, path)
        except (OSError, CheckpointException) as error:
            self.failure = reason(error)

    def load_checkpoint(self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = True) -> dict:
        return read(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(path)


def reason(error: BaseException) -> str:
    """Why a checkpoint could not be written, in a line; of several ranks the first one's reason."""
    failures = [failure[0] for failure in getattr(error, "failures", {}).values()]
    return next(iter(str(failures[0] if failures else error).splitlines()), type(error).__name__)


class Checkpoints(Checkpoint):
    """`step-000100.ckpt` every so often and at the end, `last.ckpt` for the newest, `best-000100-2.34567.ckpt`.

    A step where validation is due is saved after it, so that the resumed run has the metric too; one that had to be
    saved before it, since the run was to stop, is validated when the run goes on. A best file holds
    the weights that gave the `monitor` in its name. `last` and `best` are further names of one file. Where the disk
    refuses a file, the earlier ones stay, a warning says so and the run goes on, unless it was the run's last.

    Args:
        folder: where they go.
        every_n_steps: interval in optimizer steps; None: no such interval.
        every_minutes: the longest time between two of them, to the end of a step; None: no such interval.
        keep_last: how many of the newest `step-` files stay.
        keep_best: how many of the best stay.
        monitor: a metric of validation; less is better of a loss, perplexity, error or bits, else more.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 1,
        keep_best: int = 1,
        monitor: str = ALWAYS,
    ):
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.monitor = monitor
        self.sign = 1 if lower_is_better(monitor) else -1
        self.overdue = self.failing = self.unvalidated = False

    def state_dict(self) -> dict:
        return {"monitor": self.monitor, "unvalidated": self.unvalidated}

    def load_state_dict(self, state_dict: dict) -> None:
        if self.keep_best and state_dict.get("monitor", self.monitor) != self.monitor:
            raise UserError(f"checkpoint.monitor={self.monitor}: this run's best are by {state_dict['monitor']}")
        self.unvalidated = state_dict.get("unvalidated", False)

    def on_fit_start(self, trainer: Trainer, task: LightningModule) -> None:
        """Refuse a monitor that is none of the metrics; where there is no validation, one that somebody has chosen."""
        known = task.measured()
        if self.monitor not in known and (known or self.monitor != ALWAYS):
            listed = f"validation has {', '.join(sorted(known))}" if known else "there is no validation"
            raise UserError(f"checkpoint.monitor={self.monitor}: {listed}")

    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self.saved = time.monotonic()
        if self.unvalidated:
            validate(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self.every_minutes:
            late = time.monotonic() - self.saved >= 60 * self.every_minutes
            self.overdue = trainer.strategy.reduce_boolean_decision(late, all=False)
        stopping = trainer.should_stop  # someone may be about to kill the run: save now, and again after validation
        self.unvalidated = validation_due(trainer)
        if self._due(trainer) and (stopping or not self.unvalidated):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.state.fn != "fit":
            return
        self.unvalidated = False
        score = trainer.callback_metrics.get(self.monitor)  # None: not defined, as a correlation with what is constant
        best = score is not None and self._is_best(trainer, float(score))
        if best or self._due(trainer):
            self.save(trainer, float(score) if best else None)

    def save(self, trainer: Trainer, score: float | None = None) -> None:
        """Writes this step's file under its names, the best's where a `score` is given; to be called on all ranks.

        Weights that are not finite get no file, which would take the place of a good one.
        """
        finite = all(weight.isfinite().all() for weight in trainer.lightning_module.parameters())
        if not trainer.strategy.reduce_boolean_decision(finite):
            rank_zero_warn(f"step {trainer.global_step} is not saved: its weights are not finite")
            return
        step, io = trainer.global_step, trainer.strategy.checkpoint_io
        own = [] if score is None else [f"best-{step:06d}-{score:.6g}.ckpt"]  # first: a run that is killed and goes on
        own += [f"step-{step:06d}.ckpt"] if self._due(trainer) else []  # from this step does not validate it again
        trainer.save_checkpoint(self.folder / own[0], weights_only=False)
        if trainer.is_global_zero and not io.failure:
            try:
                for name in [*own[1:], "last.ckpt"]:
                    link(self.folder / own[0], name)
                self._prune()
            except OSError as error:
                io.failure = reason(error)
        failure = trainer.strategy.broadcast(io.failure)  # the other ranks wait until all is done
        before = names(self.folder)
        if failure and last_step(trainer):
            raise UserError(f"{self.folder / own[0]}: the run's last checkpoint could not be written ({failure}); make "
                            f"room and {'go on from the one before it' if before else 'start again: none was written'}")
        if failure and not self.failing:
            rank_zero_warn(f"{self.folder / own[0]} could not be written ({failure}): {EARLIER[bool(before)]}, the run "
                           "goes on, and tries again when the next is due")
        self.failing, self.overdue, self.saved = bool(failure), False, time.monotonic()

    def best(self) -> Path | None:
        """The best file of the run so far."""
        return next((self.folder / name for name in self._best()), None)

    def _due(self, trainer: Trainer) -> bool:
        by_steps = bool(self.every_n_steps) and trainer.global_step % self.every_n_steps == 0
        return last_step(trainer) or self.overdue or by_steps

    def _is_best(self, trainer: Trainer, score: float) -> bool:
        """Rank 0's answer, since it alone need see the folder."""
        kept = self._best()[: self.keep_best]
        room = len(kept) < self.keep_best
        best = score == score and (room or bool(kept) and self.sign * score < self.sign * _score(kept[-1]))
        return trainer.strategy.broadcast(best)

    def _best(self) -> list[str]:
        """Names of the best files, best first."""
        found = (name for name in names(self.folder) if name.startswith("best-"))
        return sorted(found, key=lambda name: self.sign * _score(name))

    def _prune(self) -> None:
        steps = [name for name in names(self.folder) if name.startswith("step-")]
        for name in steps[: max(0, len(steps) - self.keep_last)] + self._best()[self.keep_best :]:
            remove(self.folder / name)


def _score(name: str) -> float:
    return float(re.fullmatch(r"best-\d+-(.+)\.ckpt", name)[1])


class Preemption(Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C the step is finished and saved, then training stops; `preempted` tells the command
    to exit with `exit_code`, so that a scheduler runs it again. A signal to any one rank is enough. What comes after
    the last step, once that is saved, is left at once: a run that goes on does it again.

    All but Ctrl-C tell the command to `requeue` its job, if it is one of SLURM that was not cancelled.
    """

    exit_code = STOPPED

    def __init__(self):
        self.preempted = self.requeue = False
        self._asked = 0
        self._earlier: dict[int, object] = {}

    def on_train_start(self, *_: object) -> None:
        self._listen(self._ask)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._agree(trainer)
        if self.preempted:
            if not (validation_due(trainer) or last_step(trainer)):
                trainer.limit_val_batches = 0  # stopping would bring on a validation that the whole run does not have
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        self._agree(trainer)  # in the last validation somebody may have asked
        self._restore()

    def on_test_start(self, trainer: Trainer, *_: object) -> None:
        self._listen(lambda number, _: self._leave(trainer, number))

    def on_validation_start(self, trainer: Trainer, *_: object) -> None:
        if trainer.state.fn == "validate":
            self.on_test_start(trainer)

    def on_test_end(self, *_: object) -> None:
        self._restore()

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.state.fn == "validate":
            self._restore()

    def on_exception(self, *_: object) -> None:
        self._restore()

    def _agree(self, trainer: Trainer) -> None:
        """Have all ranks know what one of them was asked for."""
        asked = torch.tensor(float(self._asked), device=trainer.strategy.root_device)
        asked = trainer.strategy.reduce(asked, reduce_op="max")
        self.preempted, self.requeue = bool(asked > 0), bool(asked > 1)

    def _listen(self, handler: Callable[[int, object], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python takes signal handlers from the main thread only
        for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
            if number := getattr(signal, name, None):
                self._earlier[number] = signal.signal(number, handler)

    def _ask(self, number: int, *_: object) -> None:
        self._asked = max(self._asked, 1 if number == signal.SIGINT else 2)
        if number == signal.SIGINT:  # a second Ctrl-C does not wait
            signal.signal(number, self._earlier.pop(number))

    def _leave(self, trainer: Trainer, number: int) -> None:
        for each in self._earlier:
            signal.signal(each, signal.SIG_IGN)  # the process ends
        self._earlier.clear()
        self.preempted, self.requeue = True, number != signal.SIGINT
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)  # the other ranks, which would wait for this one
        raise SystemExit(self.exit_code)

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()
