"""Classification of the words of a text, as names and parts of speech are found: a tag at each word's first piece.

The net's head is a `lmzoo.blocks.head.Tagger`. A decoder sees of a text what comes before a word, and not what follows.
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ..blocks.loss import IGNORED, cross_entropy
from .classification import Majority
from .downstream import Downstream, tokens


class TokenClassification(Downstream):
    """Cross-entropy at the tagged positions only; accuracy and macro F1 over tags, of single words."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        lost = [f"{rows.split.n_untagged:,} words of {name}" for name, rows in self.trainer.datamodule.rows.items()
                if rows.split.n_untagged]
        if lost:
            self.warn_once(f"the tokenizer leaves nothing of {', '.join(lost)}, whose tags are not learned or measured")

    def metrics_of(self, kind: str | None) -> Mapping[str, Metric]:
        n = {"num_classes": self.n_outputs, "validate_args": False}
        return {"accuracy": MulticlassAccuracy(average="micro", **n), "f1": MulticlassF1Score(average="macro", **n),
                "majority": Majority(**n)}

    def logits(self, batch: dict) -> Tensor:
        """Those of all tagged positions (N, tags), row by row, in fp32."""
        tagged = batch["labels"] != IGNORED
        return self.net(batch["input_ids"], batch["attention_mask"],
                        readout=lambda head, hidden: head(hidden[tagged])).float()

    def judged(self, logits: Tensor, batch: dict) -> dict[str, Tensor]:
        labels = batch["labels"][batch["labels"] != IGNORED]
        return cross_entropy(nn.Identity(), logits, labels, **self.cross_entropy_options())

    def count(self, logits: Tensor, batch: dict) -> None:
        if len(logits):
            self.scores.update(logits, batch["labels"][batch["labels"] != IGNORED])

    def texts(self, batch: dict) -> list[dict[str, list[str]]]:
        """The words of each row that have a tag, as the tokenizer reads them."""
        found = []
        for row, tagged in zip(tokens(batch), (batch["labels"] != IGNORED).tolist(), strict=True):
            firsts = [place for place, is_first in enumerate(tagged) if is_first]
            words = [self.tokenizer.decode(row[begin:end]).strip() for begin, end in pairwise([*firsts, len(row)])]
            found.append({"words": words})
        return found

    def predicted(self, batch: dict, logits: Tensor) -> list[dict]:
        tagged = batch["labels"] != IGNORED
        guesses = torch.full_like(batch["labels"], IGNORED).masked_scatter(tagged, logits.argmax(-1))
        return [{name: [self.labels[tag] for tag in row if tag != IGNORED] for name, row in
                 (("tags", label), ("prediction", guess))}
                for label, guess in zip(batch["labels"].tolist(), guesses.tolist(), strict=True)]

    def verdict(self, row: dict) -> str:
        wrong = [f"{word}: {guess} (it is {tag})" for word, tag, guess in
                 zip(row["words"], row["tags"], row["prediction"], strict=True) if tag != guess]
        return ", ".join(wrong) or "all right"
