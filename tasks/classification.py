"""Classification of whole texts, one label each: what a pretrained net is fine-tuned for.

An encoder is read at its first token (BERT: Devlin et al. 2018, arXiv:1810.04805), a decoder at its last kept token
(GPT: Radford et al. 2018), an encoder-decoder at its decoder's only state when that is fed the start token. The net's
head is a `lmzoo.blocks.head.Classifier`.
"""

import json
import os
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ..blocks.loss import IGNORED, cross_entropy
from ..errors import UserError, few
from .base import Task, kept, stack, wrap


class Labelled:
    """Collator: one document a row, which the data has cut to the row's length, its eos kept."""

    def __init__(self, pad: int):
        self.pad = pad

    def window(self, row_length: int) -> tuple[int, None]:
        """How many tokens a row reads; no stride, as a row is a document."""
        return row_length, None

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Documents (n,) -> input_ids, attention_mask (B, T), labels, sample (B,): the row's place in its split."""
        rows = [row["tokens"] for row in examples]
        return {
            "input_ids": stack(rows, self.pad),
            "attention_mask": kept(rows),
            "labels": torch.tensor([row["label"] for row in examples]),
            "sample": torch.tensor([row["key"][2] for row in examples]),
        }


class Classification(Task):
    """Single-label classification: accuracy and macro F1, and predictions.jsonl in the run's folder after a test."""

    def __init__(self, net: nn.Module, tokenizer, *args, **settings):
        super().__init__(net, tokenizer, *args, **settings)
        if net.family == "encoder-decoder":
            tokenizer.require("start", task="classification")
        self.collator = Labelled(pad=tokenizer.pad or 0)
        self.labels: list[str] = []
        self.predictions: list[tuple[int, dict]] = []  # (place in the split, what is written of it)

    def setup(self, stage: str) -> None:
        """Take the labels' names from the data, and count what of its texts lies beyond a row's length."""
        data, n_classes = self.trainer.datamodule, self.net.head.out.out_features
        self.labels = self.identity["labels"] = list(data.labels)  # a checkpoint names its classes
        if len(self.labels) != n_classes:
            raise UserError(f"the data has {len(self.labels)} labels, but the model's head has {n_classes} classes")
        learned = data.rows["train"].split.labels if "train" in data.rows else self.labels
        for name, rows in data.rows.items():
            if rows.split.n_unlabelled:
                raise UserError(f"{rows.split.n_unlabelled} texts of {name} have no label: leave them out")
            if unknown := [label for label in rows.split.labels if label not in learned]:
                raise UserError(f"no text of train has the label {few(map(repr, unknown))}, which {name} has: "
                                f"leave those texts out of {name}, or give others to train on")
        self.accuracy = MulticlassAccuracy(n_classes, average="micro")
        self.f1 = MulticlassF1Score(n_classes, average="macro")
        cut = [f"{rows.n_cut:,} tokens of {split}" for split, rows in data.rows.items() if rows.n_cut]
        if cut:
            self.warn_once(f"data.row_length: {', '.join(cut)} are not read")

    def logits(self, batch: dict) -> Tensor:
        """(B, n_classes) in fp32."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if self.net.family != "encoder-decoder":
            return self.net(ids, mask, readout=lambda head, hidden: head(hidden, mask)).float()
        start = torch.full_like(ids[:, :1], self.tokenizer.start)
        return self.net(ids, mask, start, readout=lambda head, hidden: head(hidden)).float()

    def loss(self, batch: dict) -> dict[str, Tensor]:
        return cross_entropy(nn.Identity(), self.logits(batch), batch["labels"], **self.cross_entropy_options())

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.accuracy.reset()
        self.f1.reset()
        self.seen = [0.0] * len(self.labels)  # texts of each class
        self.predictions = []

    def validation_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        logits = self.evaluate(batch, dataloader_idx)
        if index == 0:
            self.predictions += self.predicted(batch, logits)  # for `show`

    def test_step(self, batch: dict, index: int, dataloader_idx: int = 0) -> None:
        self.predictions += self.predicted(batch, self.evaluate(batch, dataloader_idx))

    def evaluate(self, batch: dict, source: int) -> Tensor:
        """Count the batch in the metrics; returns its logits (B, n_classes)."""
        logits, labels = self.logits(batch), batch["labels"]
        self.add(cross_entropy(nn.Identity(), logits, labels), source)
        judged = labels != IGNORED  # none in a filler
        if judged.any():
            self.accuracy.update(logits[judged], labels[judged])
            self.f1.update(logits[judged], labels[judged])
            for label in labels[judged].tolist():
                self.seen[label] += 1
        return logits

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """Nats, accuracy, F1 averaged over the classes, and the accuracy of always naming the majority class; of a set
        by itself nats and accuracy."""
        found = super().summarise(sums, split)
        if "/" in split:
            return {name: found[name] for name in ("loss", "accuracy")}
        nats, seen = found["loss"], self.reduce(self.seen)
        majority = max(seen) / max(1, sum(seen))
        return {"loss": nats, "accuracy": self.accuracy.compute(), "f1": self.f1.compute(), "majority": majority}

    def predicted(self, batch: dict, logits: Tensor) -> list[tuple[int, dict]]:
        """For each text its place in the split, and itself with its label, the prediction and all probabilities."""
        columns = (batch[name].tolist() for name in ("sample", "input_ids", "labels"))
        return [
            (
                sample,
                {
                    "text": self.tokenizer.decode(ids),
                    "label": self.labels[label],
                    "prediction": self.labels[max(range(len(row)), key=row.__getitem__)],
                    "probabilities": {name: round(p, 6) for name, p in zip(self.labels, row, strict=True)},
                },
            )
            for sample, ids, label, row in zip(*columns, logits.softmax(-1).tolist(), strict=True)
            if label != IGNORED
        ]

    def on_test_epoch_end(self) -> None:
        """Log the metrics, and write predictions.jsonl: every text of the split once, in the split's order."""
        super().on_test_epoch_end()
        if self.trainer.world_size > 1:
            parts: list = [None] * self.trainer.world_size
            dist.all_gather_object(parts, self.predictions)
            self.predictions = [prediction for part in parts for prediction in part]
        self.predictions.sort(key=lambda prediction: prediction[0])
        if self.trainer.is_global_zero:
            records = [record for _, record in self.predictions]
            write_lines(Path(self.trainer.default_root_dir) / "predictions.jsonl", records)

    def show(self) -> str:
        """Some texts that were held out, what they were taken for, and their labels."""
        if not self.predictions:
            return ""
        lines = ["Some held-out texts:"]
        for _, row in self.predictions[:: max(1, len(self.predictions) // 5)][:5]:
            guess = f"{row['prediction']} {row['probabilities'][row['prediction']]:.2f}"
            verdict = "right" if row["prediction"] == row["label"] else f"it is {row['label']}"
            lines += [wrap(textwrap.shorten(row["text"], 190, placeholder=" ..."), "  "), f"      {guess} ({verdict})"]
        return "\n".join(lines)


def write_lines(path: Path, records: list[dict]) -> None:
    """Write records as JSON lines, in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    os.replace(beside, path)
