"""Regression: the number that goes with a text, or with a pair of them, as how alike the two are.

The net's head is a `lmzoo.blocks.head.Classifier` with one output, which tells the number in deviations from the mean
of the training labels; both are kept in the checkpoint's identity as `numbers`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, PearsonCorrCoef, SpearmanCorrCoef

from ..blocks.loss import IGNORED
from .downstream import Downstream


class Regression(Downstream):
    """Squared error in training, in deviations, the mean of which is the loss; Pearson's and Spearman's correlation,
    and the mean absolute and the root mean squared error in the labels' own unit."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            numbers = torch.tensor(list(self.trained_labels()), dtype=torch.float64)
            mean, deviation = float(numbers.mean()), float(numbers.std(correction=0))
            self.identity["numbers"] = {"mean": mean, "deviation": deviation or 1.0}

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and deviation of the training labels; of none yet, where a step is only tried, 0 and 1."""
        known = self.identity.get("numbers", {"mean": 0.0, "deviation": 1.0})
        return known["mean"], known["deviation"]

    def metrics_of(self, kind: str | None) -> Mapping[str, Metric]:
        metrics = {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef(), "mae": MeanAbsoluteError(),
                   "rmse": MeanSquaredError(squared=False)}
        return {name: metric.set_dtype(torch.double) for name, metric in metrics.items()}

    def judged(self, logits: Tensor, batch: dict) -> dict[str, Tensor]:
        mean, deviation = self.scale
        kept = batch["labels"] != IGNORED
        errors = logits[kept, 0] - ((batch["numbers"][kept] - mean) / deviation).float()
        loss = errors.square().sum()
        return {"loss": loss, "nll": loss.detach(), "correct": torch.zeros(()), "targets": kept.sum()}

    def count(self, logits: Tensor, batch: dict) -> None:
        kept = batch["labels"] != IGNORED
        if kept.any():  # Pearson's can't be told of nothing
            self.scores.update(self.guesses(logits[kept]), batch["numbers"][kept])

    def predicted(self, batch: dict, logits: Tensor) -> list[dict]:
        return [{"label": label, "prediction": float(f"{guess:.9g}")}
                for label, guess in zip(batch["numbers"].tolist(), self.guesses(logits).tolist(), strict=True)]

    def guesses(self, logits: Tensor) -> Tensor:
        """(B,), in the unit of the labels."""
        mean, deviation = self.scale
        return logits[:, 0].double() * deviation + mean

    def verdict(self, row: dict) -> str:
        return f"{row['prediction']:.4g} (it is {row['label']:.4g})"
