"""Classification of whole texts, or of pairs of them, by one label each or by any number of labels.

The net's head is a `lmzoo.blocks.head.Classifier`.
"""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
    MultilabelExactMatch,
    MultilabelF1Score,
)
from torchmetrics.utilities import dim_zero_cat

from ..blocks.loss import IGNORED, cross_entropy
from ..callbacks.picture import draw_confusion
from ..errors import UserError
from .downstream import Downstream


class Majority(MulticlassConfusionMatrix):
    """The accuracy of always naming the most frequent class; `counts` are the confusions (label, prediction)."""

    def compute(self) -> Tensor:
        self.counts = super().compute()
        seen = self.counts.sum(1)
        return seen.max() / seen.sum()


class AUROC(MulticlassAUROC):
    """The mean over the classes of one against the rest, of which some texts are and some are not."""

    def compute(self) -> Tensor:
        labels = dim_zero_cat(self.target)
        seen = labels.bincount(minlength=self.num_classes)
        return super().compute()[(seen > 0) & (seen < len(labels))].mean()


class Classification(Downstream):
    """One label a text (`task.labels=class`, by cross-entropy), or any number (`classes`, by that of each class).

    class_weights: of each class in the training loss, in the order of their names; "balanced": a class weighs the less
    the more texts have it, and texts 1 on average. Of several labels a text it is what a present one weighs against an
    absent one, and "balanced" the texts without over those with it.
    """

    def __init__(self, *args, class_weights: Literal["balanced"] | list[float] | None = None, **settings):
        super().__init__(*args, **settings)
        self.class_weights = class_weights
        self.register_buffer("weights", None, persistent=False)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.class_weights is not None:
            self.weights = torch.tensor(self.weighed(), dtype=torch.float32)

    def weighed(self) -> list[float]:
        """The weight of each class."""
        if self.class_weights != "balanced":
            if len(self.class_weights) != len(self.labels) or not all(0 <= w < math.inf for w in self.class_weights):
                raise UserError(f"task.class_weights={self.class_weights}: give a number, 0 or more, for each of the "
                                f"{len(self.labels)} classes: {', '.join(self.labels)}")
            return self.class_weights
        labels = list(self.trained_labels())
        if self.trainer.datamodule.store.kind == "classes":
            seen = Counter(chain.from_iterable(labels))
            return [(len(labels) - seen[place]) / max(1, seen[place]) for place in range(len(self.labels))]
        seen = Counter(labels)
        return [len(labels) / (len(seen) * max(1, seen[place])) for place in range(len(self.labels))]

    def metrics_of(self, kind: str | None) -> Mapping[str, Metric]:
        if kind == "classes":
            n = {"num_labels": self.n_outputs, "validate_args": False}
            return {
                "f1": MultilabelF1Score(average="macro", **n),
                "f1_micro": MultilabelF1Score(average="micro", **n),
                "exact_match": MultilabelExactMatch(**n),
            }
        n = {"num_classes": self.n_outputs, "ignore_index": IGNORED, "validate_args": False}
        return {
            "accuracy": MulticlassAccuracy(average="micro", **n),
            "f1": MulticlassF1Score(average="macro", **n),
            "f1_weighted": MulticlassF1Score(average="weighted", **n),
            # of two classes alone torchmetrics makes something else than 0 of a net that always says the same
            "mcc": MulticlassMatthewsCorrCoef(**n | {"num_classes": max(3, self.n_outputs)}),
            "auroc": AUROC(average="none", **n),
            "majority": Majority(**n),
        }

    def judged(self, logits: Tensor, batch: dict) -> dict[str, Tensor]:
        """Sums over texts of a label each, or over the classes of texts with any number."""
        labels, weights = batch["labels"], self.weights if self.training else None
        if labels.dim() == 1:
            sums = cross_entropy(nn.Identity(), logits, labels, **self.cross_entropy_options())
            if weights is not None:
                nats = F.cross_entropy(logits, labels, weights, ignore_index=IGNORED, reduction="sum",
                                       label_smoothing=self.label_smoothing)
                sums["loss"] = nats + self.z_loss * logits[labels != IGNORED].logsumexp(-1).square().sum()
            return sums
        judged = labels != IGNORED
        marks, smoothing = (labels * judged).float(), self.label_smoothing if self.training else 0.0
        nats = F.binary_cross_entropy_with_logits(
            logits, marks * (1 - smoothing) + smoothing / 2, judged.float(), reduction="sum", pos_weight=weights)
        correct = ((logits > 0) == (marks > 0)) & judged
        return {"loss": nats, "nll": nats.detach(), "correct": correct.sum(), "targets": judged.sum()}

    def count(self, logits: Tensor, batch: dict) -> None:
        labels = batch["labels"]
        if labels.dim() == 1:
            self.scores.update(logits.softmax(-1), labels)  # of a filler too: all ranks gather what AUROC keeps
        elif (judged := labels[:, 0] != IGNORED).any():
            self.scores.update(logits[judged].sigmoid(), labels[judged])

    def predicted(self, batch: dict, logits: Tensor) -> list[dict]:
        """For each text its label (or labels), what it was taken for, and the probabilities of all classes."""
        several = batch["labels"].dim() > 1
        found = []
        for label, row in zip(batch["labels"].tolist(), (logits.sigmoid() if several else logits.softmax(-1)).tolist(),
                              strict=True):
            if several:
                named = [[name for name, is_one in zip(self.labels, marks, strict=True) if is_one]
                         for marks in ([mark == 1 for mark in label], [p > 0.5 for p in row])]
            else:
                named = [self.labels[label], self.labels[max(range(len(row)), key=row.__getitem__)]]
            probabilities = {name: float(f"{p:.9g}") for name, p in zip(self.labels, row, strict=True)}
            found.append({"label": named[0], "prediction": named[1], "probabilities": probabilities})
        return found

    def on_test_epoch_end(self) -> None:
        """Log the metrics, write predictions.jsonl, and draw confusion.png where a text has one label."""
        super().on_test_epoch_end()
        if "majority" in self.scores and self.trainer.is_global_zero:
            draw_confusion(self.scores["majority"].counts.tolist(), self.labels,
                           Path(self.trainer.default_root_dir) / "confusion.png")

    def verdict(self, row: dict) -> str:
        guess, label = row["prediction"], row["label"]
        if isinstance(label, list):
            told, label = ", ".join(guess) or "none", ", ".join(label) or "none"
        else:
            told = f"{guess} {row['probabilities'][guess]:.2f}"
        return f"{told} ({'right' if guess == row['label'] else f'it is {label}'})"
