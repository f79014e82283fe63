"""A run of seconds with all callbacks, for the tests that look at what it leaves: a line through random points."""

import csv
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Sampler

from lmzoo import optim
from lmzoo.callbacks import AtomicIO, Checkpoints, Metrics, Preemption, Progress

EPOCH = 7  # steps
TIMED = {"tokens_per_s", "data_wait", "mfu", "memory_mb"}  # columns that no two runs have alike


class Order(Sampler):
    step = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self):
        yield from range(self.step % EPOCH, EPOCH)


class Steps(DataLoader):
    """A loader that counts where a batch is handed out."""

    def __iter__(self):
        step = self.sampler.step
        for batch in super().__iter__():
            step += 1
            self.sampler.step = step
            yield batch

    def state_dict(self) -> dict:
        return {"step": self.sampler.step}

    def load_state_dict(self, state: dict) -> None:
        self.sampler.step = state["step"]


class Data(pl.LightningDataModule):
    """The batches that there are; of no mixture."""

    def __init__(self, **loaders: DataLoader):
        super().__init__()
        for split, loader in loaders.items():
            setattr(self, f"{split}_dataloader", lambda loader=loader: loader)

    def seen(self, step: int) -> dict[str, int]:
        return {}


class Task(pl.LightningModule):
    """A line through points; it hands out what lmzoo's tasks hand out."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.automatic_optimization = False
        self.identity = {"config": {"seed": 0, "optim": {"lr": 0.05}, "tags": ["a"]}, "wandb_id": "abc123"}
        self.plan = SimpleNamespace(mfu=lambda *_: None)

    def measured(self):
        return ["val/loss", "val/accuracy", "val/error_rate", "val/f1"]  # more than it then logs

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.net(batch) - 1).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach(), "lr": 0.05, "grad_norm": torch.tensor(2.0), "targets": 4, "tokens": 12}

    def validation_step(self, batch, index):
        pass

    def on_validation_epoch_end(self):
        self.log("val/loss", score(self.net.weight), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test/loss", 0.5)

    def configure_optimizers(self):
        return optim.build(self.net, {"lr": 0.05, "weight_decay": 0.1, "optimizer": torch.optim.AdamW})

    def on_save_checkpoint(self, state):
        state["lmzoo"] = self.identity


def score(weight: torch.Tensor) -> torch.Tensor:
    """A 'validation loss' that tells which weights it is of, and is not always falling."""
    return (weight.detach().sum() * 40).sin() + 2


def run(folder: Path, *more: Callback, max_steps: int = 20, ckpt: Path | None = None, **settings) -> SimpleNamespace:
    """20 steps, validation every 6, a checkpoint every 4, a row every 2; logged through all callbacks."""
    logger = {"wandb": settings.pop("wandb", None), "tensorboard": settings.pop("tensorboard", False)}
    every = {"every_n_steps": 4, "keep_last": 2, "keep_best": 2} | settings
    parts = SimpleNamespace(
        preemption=Preemption(), metrics=Metrics(folder, every_n_steps=2, tags=["a"], **logger),
        progress=Progress(seconds=0.0), checkpoints=Checkpoints(folder / "checkpoints", **every),
    )  # fmt: skip
    parts.trainer = pl.Trainer(
        callbacks=[*more, *vars(parts).values()], plugins=[AtomicIO()], accelerator="cpu", max_steps=max_steps,
        max_epochs=-1, check_val_every_n_epoch=None, val_check_interval=6, log_every_n_steps=2, logger=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, enable_model_summary=False,
    )  # fmt: skip
    points = torch.randn(EPOCH, 4, 3, generator=torch.Generator().manual_seed(0))
    train = Steps(points, sampler=Order(), batch_size=None, generator=torch.Generator())
    evaluated = DataLoader(points, batch_size=None)
    parts.task, parts.data = Task(), Data(train=train, val=evaluated, test=evaluated)
    parts.trainer.fit(parts.task, datamodule=parts.data, ckpt_path=ckpt)
    return parts


class At(Callback):
    """Does something at the end of a step, before the other callbacks."""

    def __init__(self, step: int, act):
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.act(trainer)


def rows(folder: Path) -> list[dict]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if v and k not in TIMED} for row in csv.DictReader(file)]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())
