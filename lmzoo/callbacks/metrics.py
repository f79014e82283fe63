"""The record of a run: metrics.csv, its picture, and the same rows for wandb."""

import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from .picture import draw
from .steps import validation_due
from .tracking import Wandb

COLUMNS = ["step", "epoch", "tokens", "train/loss", "lr", "grad_norm", "tokens_per_s"]
SECONDS_BETWEEN_PICTURES = 60


class Metrics(Callback):
    """One row of metrics.csv every so many steps and at each validation; loss.png; each row to wandb as well.

    `tokens` counts all ranks since the run began. `tokens_per_s` is tokens over elapsed time since the row before,
    validation left out. Rows are only ever appended; when a run goes on from step s, those beyond s are cut first.
    The task may carry a `plan` (model FLOPs utilisation becomes the column `mfu` where the device's peak is known) and
    an `identity` (`wandb_id`, and `config` for wandb to show).

    Args:
        folder: the run folder.
        every_n_steps: interval of the training rows, in optimizer steps.
        wandb: settings of `Wandb` (mode, project, name, notes); None: no wandb.
        tags: wandb's tags.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int = 10,
        wandb: Mapping | None = None,
        tags: Sequence[str] = (),
    ):
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.settings = {"mode": "disabled"} if wandb is None else dict(wandb)
        self.tags = tags
        self.wandb: Wandb | None = None
        self.table = Table(self.folder / "metrics.csv", COLUMNS)
        self.tokens = 0
        self.row: dict[str, float] = {}

    def state_dict(self) -> dict:
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict) -> None:
        self.tokens = state_dict["tokens"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        if trainer.is_global_zero:
            self.table.cut(trainer.global_step)
            identity = getattr(task, "identity", {})
            self.wandb = Wandb(
                self.folder, id=identity.get("wandb_id"), config=identity.get("config"), tags=self.tags, **self.settings
            )
        self.drawn = self.clock = time.perf_counter()
        self.tokens_before = self.tokens

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Mapping, *_: object) -> None:
        self.tokens += int(outputs["tokens"])
        if not trainer.is_global_zero:
            return
        due = validation_due(trainer)
        logged = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if logged or due:
            self.row = self._where(trainer)
        if logged:
            self.row |= {"train/loss": float(outputs["loss"])}
            self.row |= {name: float(outputs[name]) for name in ("lr", "grad_norm")} | self._speed(trainer, task)
        if logged and not due:
            self._write()

    def on_validation_start(self, *_: object) -> None:
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
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
        if trainer.is_global_zero and self.wandb:
            self.row = self._where(trainer) | _metrics(trainer, "test/")
            self._write()

    def on_exception(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Ends the wandb run; the command calls it once all is done, the test too."""
        if self.wandb:
            self.wandb.finish()

    def _where(self, trainer: Trainer) -> dict[str, float]:
        step = trainer.global_step
        return {"step": step, "epoch": round(step / trainer.num_training_batches, 4), "tokens": self.tokens}

    def _speed(self, trainer: Trainer, task: LightningModule) -> dict[str, float]:
        now = time.perf_counter()
        speed = (self.tokens - self.tokens_before) / (now - self.clock)
        self.clock, self.tokens_before = now, self.tokens
        plan = getattr(task, "plan", None)
        mfu = plan.mfu(speed, trainer.world_size) if plan else None
        return {"tokens_per_s": round(speed, 1)} | ({} if mfu is None else {"mfu": round(mfu, 4)})

    def _write(self) -> None:
        self.table.append(self.row)
        self.wandb.log({k: v for k, v in self.row.items() if k != "step"}, step=self.row["step"])
        self.row = {}

    def _draw(self) -> None:
        draw(self.table.read(), self.folder / "loss.png", title=self.folder.name)
        self.drawn = time.perf_counter()


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
        text = self.path.read_text()
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        self.columns += [name for name in reader.fieldnames or () if name not in self.columns]
        return [{name: _number(cell) for name, cell in row.items() if cell} for row in reader]

    def cut(self, step: int) -> None:
        """Leaves out the rows beyond `step`."""
        self._rewrite([row for row in self.read() if row["step"] <= step])

    def append(self, row: Mapping[str, float]) -> None:
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self._rewrite(self.read())
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _rewrite(self, rows: list[dict[str, float]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
