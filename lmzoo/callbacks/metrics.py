"""The record of a run: metrics.csv, its picture, and the same rows for wandb and TensorBoard."""

import csv
import io
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

try:
    import resource
except ImportError:  # Windows has none
    resource = None

from ..errors import UserError, naming
from .picture import draw
from .steps import Losses, validation_due
from .tracking import TensorBoard, Wandb

COLUMNS = ["step", "epoch", "tokens", "train/loss", "train/perplexity", "lr", "grad_norm", "tokens_per_s", "data_wait"]
SECONDS_BETWEEN_PICTURES = 60


class Metrics(Callback):
    """One row of metrics.csv every so many steps and at each validation; loss.png; each row to the trackers as well.

    `tokens` counts all ranks since the run began. `train/loss` is the mean over all targets since the training row
    before. `tokens_per_s` is tokens over elapsed time since then, validation left out, and `data_wait` the share of
    that time in which the first rank waited for its loader. `memory_mb` is its device's peak, on a CPU the process's.
    Columns `lr/GROUP` appear where the optimizer's groups differ in it, `loss_scale` under fp16, `skipped` once steps
    were, `seen/NAME` (rows since the run began) for each source of a mixture. Rows are only ever appended; when
    a run goes on from step s, those beyond s are cut first.
    The task carries a `plan` (model FLOPs utilisation becomes the column `mfu` where the device's peak is known) and an
    `identity` (`wandb_id`, and `config` for wandb to show), and may carry an `environment` (shown too).

    Args:
        folder: the run folder.
        every_n_steps: interval of the training rows, in optimizer steps.
        wandb: settings of `Wandb` (mode, project, ...); None: no wandb.
        tags: wandb's tags.
        tensorboard: whether to write TensorBoard's files too.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int = 10,
        wandb: Mapping | None = None,
        tags: Sequence[str] = (),
        tensorboard: bool = False,
    ):
        if tensorboard:
            TensorBoard.require()
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.settings = {"mode": "disabled"} if wandb is None else dict(wandb)
        words = signature(Wandb).parameters.keys() - {"folder", "id", "config", "environment", "tags"}
        if wrong := self.settings.keys() - words:
            raise UserError(f"callbacks.metrics.wandb: there is no word {min(wrong)}; give {', '.join(sorted(words))}")
        self.tags = tags
        self.tensorboard = tensorboard
        self.trackers: list[Wandb | TensorBoard] = []
        self.table = Table(self.folder / "metrics.csv", COLUMNS)
        self.table.read()  # for the damage that it may have, before any long work
        self.tokens = 0
        self.losses = Losses()
        self.row: dict[str, float] = {}

    def state_dict(self) -> dict:
        return {"tokens": self.tokens, "losses": self.losses.plain(), "row": dict(self.row)}  # it waits for validation

    def load_state_dict(self, state_dict: dict) -> None:
        self.tokens = state_dict["tokens"]
        self.losses.steps = [tuple(step) for step in state_dict.get("losses", ())]
        self.row = dict(state_dict.get("row", {}))

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.is_global_zero:
            self.table.cut(trainer.global_step, waiting=bool(self.row), ended=trainer.global_step == trainer.max_steps)
            self.trackers = [Wandb(
                self.folder, id=task.identity.get("wandb_id"), config=task.identity.get("config"), tags=self.tags,
                environment=getattr(task, "environment", None), **self.settings,
            )]  # fmt: skip
            if self.tensorboard:
                self.trackers.append(TensorBoard(self.folder, trainer.global_step))
        self.drawn = self.clock = time.perf_counter()
        self.tokens_before, self.waited_before = self.tokens, _waited(trainer)

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Mapping, *_: object) -> None:
        self.tokens += int(outputs["tokens"])
        if not trainer.is_global_zero:
            return
        self.losses.add(outputs)
        due = validation_due(trainer)
        logged = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if logged or due:
            self.row = self._where(trainer)
        if logged:
            loss = self.losses.read()
            self.row |= {"train/loss": loss, "train/perplexity": math.exp(loss) if loss < 700 else loss * math.inf}
            self.row |= {name: float(outputs[name]) for name in ("lr", "grad_norm")} | _rates(trainer) | _skips(outputs)
            self.row |= self._speed(trainer, task) | _memory(task)
        for tracker in self.trackers:
            tracker.watch(task.net, trainer.global_step)
        if logged and not due:
            self._write()

    def on_validation_start(self, *_: object) -> None:
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        self.row = (self.row or self._where(trainer)) | _metrics(trainer, "val/")
        self._write()
        if time.perf_counter() - self.drawn > SECONDS_BETWEEN_PICTURES:
            self._draw()
        self.clock += time.perf_counter() - self.paused

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.is_global_zero:
            self._draw()

    def on_test_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.is_global_zero and self.trackers:
            self.row = self._where(trainer) | _metrics(trainer, "test/")
            self._write()

    def on_exception(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Ends what the trackers write; the command calls it once all is done, the test too."""
        for tracker in self.trackers:
            tracker.finish()

    def _where(self, trainer: Trainer) -> dict[str, float]:
        step = trainer.global_step
        where = {"step": step, "epoch": round(step / trainer.num_training_batches, 4), "tokens": self.tokens}
        return where | {f"seen/{name}": n for name, n in trainer.datamodule.seen(step).items()}

    def _speed(self, trainer: Trainer, task: LightningModule) -> dict[str, float]:
        now, waited = time.perf_counter(), _waited(trainer)
        speed = (self.tokens - self.tokens_before) / (now - self.clock)
        wait = (waited - self.waited_before) / (now - self.clock)
        self.clock, self.tokens_before, self.waited_before = now, self.tokens, waited
        mfu = task.plan.mfu(speed, trainer.world_size)
        speeds = {"tokens_per_s": round(speed, 1), "data_wait": round(wait, 4)}
        return speeds | ({} if mfu is None else {"mfu": round(mfu, 4)})

    def _write(self) -> None:
        self.table.append(self.row)
        for tracker in self.trackers:
            tracker.log({k: v for k, v in self.row.items() if k != "step"}, step=self.row["step"])
        self.row = {}

    def _draw(self) -> None:
        draw(self.table.read(), self.folder / "loss.png", title=self.folder.name)
        self.drawn = time.perf_counter()


def _waited(trainer: Trainer) -> float:
    """Seconds for which training has waited for its loader so far."""
    return getattr(trainer.train_dataloader, "waited", 0.0)


def _rates(trainer: Trainer) -> dict[str, float]:
    """The learning rate of each of the optimizer's groups, where they were not given the same."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if len({group.get("initial_lr") for group in groups}) < 2:
        return {}
    return {f"lr/{group.get('name', n)}": group["lr"] for n, group in enumerate(groups)}


def _skips(outputs: Mapping) -> dict[str, float]:
    """How many steps changed nothing, if any, and what losses are multiplied with under fp16."""
    told = {name: outputs[name] for name in ("loss_scale", "skipped") if name in outputs}
    return told if any(told.values()) else {}


def _memory(task: LightningModule) -> dict[str, float]:
    """The peak of this process's memory in MB: on its GPU, else in all."""
    if task.device.type == "cuda":
        n_bytes = torch.cuda.max_memory_allocated(task.device)
    elif resource is not None:
        n_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        return {}
    return {"memory_mb": round(n_bytes / 1e6, 1)}


def _metrics(trainer: Trainer, prefix: str) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}


class Table:
    """A CSV file that is appended to; a new column rewrites it once, with empty cells above."""

    def __init__(self, path: Path, columns: Sequence[str]):
        self.path = path
        self.columns = list(columns)

    def read(self) -> list[dict[str, float]]:
        """Its rows as numbers, empty cells left out; a last line that was torn by a kill is not a row."""
        if not self.path.exists():
            return []
        reader = csv.DictReader(())
        try:
            text = self.path.read_text(encoding="utf-8")
            reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
            if text and "step" not in (reader.fieldnames or ()):
                raise ValueError("no column is called step")
            rows = [_numbers(row) for row in reader]
        except (ValueError, csv.Error) as error:
            raise UserError(f"{self.path} is not the table of a run (line {max(1, reader.line_num)}: {error}): mend "
                            "it, or move it away, and the run begins another") from error
        self.columns += [name for name in reader.fieldnames or () if name not in self.columns]
        return rows

    def cut(self, step: int, waiting: bool = False, ended: bool = False) -> None:
        """Leaves out the rows beyond `step`; where its own is `waiting` to be written that one too, and of a run that
        has `ended` with it the row of a test."""
        def stays(row: Mapping[str, float]) -> bool:
            here = waiting or ended and any(name.startswith("test/") for name in row)
            return row["step"] < step or row["step"] == step and not here

        self._rewrite([row for row in self.read() if stays(row)])

    def append(self, row: Mapping[str, float]) -> None:
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self._rewrite(self.read())
        with naming(self.path), open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _rewrite(self, rows: list[dict[str, float]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with naming(self.path), open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    if None in row or not row["step"]:
        raise ValueError("more cells than columns" if None in row else "the step is missing")
    return {name: _number(cell) for name, cell in row.items() if cell}


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
