"""Classification of the words of a text, as names and parts of speech are found: a tag at each word's first piece.

The net's head is a `lmzoo.blocks.head.Tagger`. A decoder sees of a text what comes before a word, and not what follows.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from nervaluate import Evaluator
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ..blocks.loss import IGNORED, cross_entropy
from .classification import Majority
from .downstream import Downstream, in_full, tokens


class EntityF1(Metric):
    """F1 of entities of which all words and the kind are right: B-PER begins one, I-PER goes on with it, O is none."""

    def __init__(self, names: Sequence[str]):
        super().__init__()
        self.names, self.kinds = names, sorted({name[2:] for name in names} - {""})
        self.add_state("counts", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")  # right, there, found

    @staticmethod
    def of(names: Sequence[str]) -> bool:
        """Whether tags are of entities."""
        return any(name[:2] in ("B-", "I-") for name in names) and all(
            name == "O" or name[:2] in ("B-", "I-") and len(name) > 2 for name in names)

    def update(self, preds: Tensor, target: Tensor, lengths: list[int]) -> None:
        """preds (N, tags), target (N,): of all words, row by row; lengths: words of each row."""
        sides = [[[self.names[tag] for tag in row.tolist()] for row in tags.split(lengths)]
                 for tags in (target, preds.argmax(-1))]  # fmt: skip
        exact = Evaluator(*sides, tags=self.kinds, loader="list").evaluate()["overall"]["strict"]
        self.counts += torch.tensor([exact.correct, exact.possible, exact.actual]).to(self.counts)

    def compute(self) -> Tensor:
        """Not a number where there is no entity, and none is found."""
        return 2 * self.counts[0] / (self.counts[1] + self.counts[2])


class TokenClassification(Downstream):
    """Cross-entropy at the tagged positions only; accuracy and macro F1 over tags of single words, F1 of entities."""

    uncounted = "; the tags of their words are neither learned nor measured"

    def setup(self, stage: str) -> None:
        super().setup(stage)
        lost = [f"{rows.split.n_untagged:,} words of {name}" for name, rows in self.trainer.datamodule.rows.items()
                if rows.split.n_untagged]
        if lost:
            self.warn_once(f"the tokenizer leaves nothing of {', '.join(lost)}, whose tags are not learned or measured")

    def metrics_of(self, kind: str | None) -> Mapping[str, Metric]:
        n = {"num_classes": self.n_outputs, "validate_args": False}
        entities = {"entity_f1": EntityF1(self.labels)} if EntityF1.of(self.labels) else {}
        return {"accuracy": MulticlassAccuracy(average="micro", **n), "f1": MulticlassF1Score(average="macro", **n),
                "majority": Majority(**n)} | entities

    def logits(self, batch: dict) -> Tensor:
        """Those of all tagged positions (N, tags), row by row, in fp32."""
        tagged = batch["labels"] != IGNORED
        return self.net(batch["input_ids"], batch["attention_mask"],
                        readout=lambda head, hidden: in_full(head, hidden[tagged]))

    def judged(self, logits: Tensor, batch: dict) -> dict[str, Tensor]:
        labels = batch["labels"][batch["labels"] != IGNORED]
        return cross_entropy(nn.Identity(), logits, labels, **self.cross_entropy_options())

    def count(self, logits: Tensor, batch: dict) -> None:
        tagged = batch["labels"] != IGNORED
        if len(logits):
            self.scores.update(preds=logits, target=batch["labels"][tagged], lengths=tagged.sum(1).tolist())

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
