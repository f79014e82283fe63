"""Tasks on a few labelled documents: nets of each family, batches shared among ranks, what a test measures."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lightning import LightningDataModule, Trainer
from torch.utils.data import DataLoader

import models
from lmzoo.tokenizer import byte

TOKENIZER = byte([], 400, sentinels=3)
TEXTS = ["load a document", "list a folder", "match", "dump it", "walk the tree of folders", "search", "scan"]
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "optimizer": partial(torch.optim.AdamW)}
POOL = {"bert": "first", "gpt": "last", "t5": "last"}


def task(kind, name="gpt", n=3, head="Classifier", settings=None, **words):
    """A task of class `kind` on a small net with n outputs."""
    head = {"_target_": f"lmzoo.blocks.head.{head}", "_partial_": True, "n_classes": n}
    head |= {"pool": POOL[name]} if head["_target_"].endswith("Classifier") else {}
    net = models.make(name, vocab_size=len(TOKENIZER), head=head, **words)
    made = kind(net, TOKENIZER, OPTIM, lambda step, total: 1.0, **(settings or {})).eval()
    made.collator.tell([f"label {i}" for i in range(n)])
    return made


def examples(labels, texts=TEXTS, seconds=None):
    """Rows of texts, or of pairs, with these labels."""
    for sample, (text, label) in enumerate(zip(texts, labels, strict=True)):
        row = {"tokens": np.array(TOKENIZER.document(TOKENIZER.encode(text))), "label": label, "key": (0, 0, sample)}
        if seconds:
            row["second"] = len(row["tokens"])
            row["tokens"] = np.append(row["tokens"], [*TOKENIZER.encode(seconds[sample]), TOKENIZER.eos])
        yield row


def held(cut=0, unlabelled=0, labels=(), untagged=0, numbers=()):
    """What a task asks of a split's rows; `numbers`: their labels, whatever these are."""
    split = SimpleNamespace(n_unlabelled=unlabelled, n_untagged=untagged, labels=list(labels),
                            n_documents=len(numbers), label=lambda document: numbers[document])  # fmt: skip
    rows = SimpleNamespace(n_cut=cut, n_too_long=cut // 100, split=split)
    rows.sources = {None: rows}
    return rows


class Texts(LightningDataModule):
    """Rows in batches, shared out as the real data module does: a rank that comes out short reads a filler."""

    def __init__(self, collator, rows, labels, kind="class", rank=0, world=1, size=2):
        super().__init__()
        self.labels, self.rows, self.store = labels, {"test": held()}, SimpleNamespace(kind=kind, splits=())
        rows = list(rows)
        batches = [collator(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        filler = batches[0] | {"labels": torch.full_like(batches[0]["labels"], -100)}
        self.batches = (batches + [filler] * (-len(batches) % world))[rank::world]

    def evaluated(self, split):
        return [None]

    def val_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    test_dataloader = val_dataloader


def evaluate(folder, tested, data, world=1, split="test"):
    """(metrics, the predictions that were written in the file's order, what is shown)."""
    shared = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if world == 2 else {}
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=folder, **shared)
    run = {"test": trainer.test, "val": trainer.validate}[split]
    (metrics,) = run(tested, datamodule=data, verbose=False)
    file = Path(folder) / "predictions.jsonl"
    written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return metrics, written, tested.show()


def learn(model, rows, steps=200, lr=5e-3):
    """Loss per target after so many steps on one batch."""
    batch = model.collator(list(rows))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        sums = model.loss(batch)
        (sums["loss"] / sums["targets"]).backward()
        optimizer.step()
    return sums["loss"].item() / sums["targets"].item()
