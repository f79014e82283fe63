"""Runs of a fraction of a second by the command's words, and what of their folders must be equal: all but times."""

import csv
import hashlib
import random
from contextlib import contextmanager

import pytest
import torch

from lmzoo import checkpoint, plan

TINY = (
    "size=tiny", "model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=32", "model.max_len=24",
    "model.dropout=0.2", "data.batch_size=8", "data.val_fraction=0.1", "optim.lr=1e-2", "trainer.precision=32-true",
    "trainer.max_steps=8", "trainer.val_every_n_steps=3", "trainer.log_every_n_steps=2", "checkpoint.every_n_steps=1",
    "checkpoint.keep_last=9", "logger.wandb.mode=disabled", "tokenizer=byte", "data.processes=1",
)  # fmt: skip
TASKS = {
    "clm": ("model=gpt", "task=clm", "data=text"),
    "mlm": ("model=bert", "task=mlm", "data=text"),
    "span_corruption": ("model=t5", "task=span_corruption", "data=text"),
    "classification": ("model=bert", "task=classification", "data=csv"),
}
TIMES = {"tokens_per_s", "mfu", "data_wait", "memory_mb"}  # columns that tell of the machine


@contextmanager
def lean():
    """Without the pass that a plan measures, the picture, and what a net shows at the end: none of them trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MEASURED_SECONDS", 0.0)
        patch.setattr("lmzoo.callbacks.metrics.draw", lambda *_, **__: None)
        patch.setattr("lmzoo.train.learned", lambda task: "")
        yield


def texts(folder):
    """Write a source of each kind; returns its words. Short documents, about thirty rows of them."""
    draw = random.Random(0)
    lines = ["".join(draw.choices("abcdefgh ", k=draw.randint(9, 29))) for _ in range(36)]
    (folder / "a.txt").write_text("\n\n".join(lines), encoding="utf-8")
    (folder / "b.txt").write_text("\n\n".join(line.upper() for line in lines[::3]), encoding="utf-8")
    labelled = [f"{line},{line.count('a') % 3}" for line in lines]
    (folder / "c.csv").write_text("\n".join(["text,label", *labelled]), encoding="utf-8")
    named = [f"data.sources.{name}.path={folder / name}.txt" for name in "ab"]
    sets = [f"data.sources.b.val_path.x={folder / 'a.txt'}", f"data.sources.b.val_path.y=[{folder / 'c.csv'}]"]
    return {
        "data=text": [f"data.path={folder / 'a.txt'}"],
        "data=csv": [f"data.path={folder / 'c.csv'}"],
        "data=mixture": [*named, *sets, "data.sources.a.weight=0.3", "data.sources.b.weight=0.7"],
    }


def spoken(texts, *more):
    """All words of a run on `texts`; later ones win."""
    given = {word.partition("=")[0]: word for word in (*TINY, *more)}
    return [*given.values(), *texts[given["data"]]]


def digest(folder, file="last.ckpt"):
    """sha256 of the weights and the optimizer's state."""
    state, found = checkpoint.read(folder / "checkpoints" / file), hashlib.sha256()

    def add(node):
        if isinstance(node, torch.Tensor):
            found.update(node.numpy().tobytes())
        elif isinstance(node, dict):
            [add(node[name]) for name in node]
        elif isinstance(node, list | tuple):
            [add(item) for item in node]
        else:
            found.update(repr(node).encode())

    add([state["state_dict"], state["optimizer_states"], state["global_step"], state["lmzoo"]["steps_taken"]])
    return found.hexdigest()


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: cell for name, cell in row.items() if name not in TIMES} for row in csv.DictReader(file)]
