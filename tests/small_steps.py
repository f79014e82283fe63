"""A net of three layers and steps of a few micro-batches, for the tests of the step and of what watches it."""

import math
from functools import partial
from unittest import mock

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lmzoo.tasks.base import Task
from torch import nn
from torch.utils.data import DataLoader

from lmzoo.blocks.loss import cross_entropy

VOCABULARY, LENGTH = 13, 6


class Net(nn.Module):
    """Just enough of a model: each position knows its own token only."""

    family, max_len = "decoder", LENGTH

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.dropout, self.head = nn.Embedding(VOCABULARY, 8), nn.Dropout(dropout), nn.Linear(8, VOCABULARY)
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, input_ids, attention_mask=None, readout=None):
        hidden = self.dropout(self.embed(input_ids)) * self.table
        return self.head(hidden) if readout is None else readout(self.head, hidden)


class Labels(Task):
    def loss(self, batch):
        labels, options = batch["labels"].flatten(), self.cross_entropy_options()
        readout = lambda head, hidden: cross_entropy(head, hidden.flatten(0, 1), labels, **options)  # noqa: E731
        return self.net(batch["input_ids"], readout=readout)


def sgd(lr=0.5, clip_norm=None):
    return {"lr": lr, "weight_decay": 0.0, "clip_norm": clip_norm, "optimizer": partial(torch.optim.SGD)}


def steady(step, total_steps):
    return 1.0


def task(net=None, optim=None, schedule=steady, dropout=0.0, **settings):
    torch.manual_seed(0)
    return Labels(net or Net(dropout), None, optim or sgd(), schedule, **settings)


def micro_batches(n, seed=0, rows=3):
    """n micro-batches whose numbers of targets are far from equal: micro-batch i keeps about i in n of its labels."""
    torch.manual_seed(seed)
    batches = []
    for number in range(n):
        ids, labels = torch.randint(VOCABULARY, (2, rows, LENGTH))
        labels[torch.rand(labels.shape) > (number + 0.5) / n] = -100
        batches.append({"input_ids": ids, "labels": labels, "micro": number})
    return batches


def joined(window):
    return [{name: torch.cat([micro[name] for micro in window]) for name in ("input_ids", "labels")} | {"micro": 0}]


def emptied(micro):
    return micro | {"labels": torch.full_like(micro["labels"], -100)}


def share(window, rank, world):
    """A rank's micro-batches of a step, and fillers where it would run short."""
    own = window[rank::world]
    return own + [emptied(window[0])] * (math.ceil(len(window) / world) - len(own))


def fit(task, windows, validation=(), ckpt_path=None, **settings):
    """Train on the windows in order; returns the steps' outputs."""
    outputs = []
    noting = LambdaCallback(on_train_batch_end=lambda trainer, task, output, *_: outputs.append(output))
    settings = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, "callbacks": noting} | settings
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                      use_distributed_sampler=False, **settings)  # fmt: skip
    loaders = [DataLoader(list(rows), batch_size=None) for rows in (windows, validation)]
    trainer.fit(task, *loaders[: 1 + bool(validation)], ckpt_path=ckpt_path)
    return outputs


def weights(task):
    return {name: weight.detach().clone() for name, weight in task.net.named_parameters()}


def assert_same(one, other, tolerance=1e-6):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


ADAMW = {"lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.1, "optimizer": partial(torch.optim.AdamW)}


def newton_schulz_in_fp32():
    """torch's Muon without its bfloat16, in which the last digits of a momentum become a hundredth of an update."""
    return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


def scaled(scale):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000))
