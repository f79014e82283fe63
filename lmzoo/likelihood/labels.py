"""Classification without training: the label whose word is the likeliest after a text, and after examples with theirs.

The examples stand before every text alike (Brown et al. 2020, arXiv:2005.14165): `n_shots` labelled texts of the train
split, drawn by `seed`. A label is said by its own name, or by its word in `words`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import NamedTuple

from torch import nn

from ..data.labelled import Document
from ..errors import UserError, few
from ..texts import spoken
from .pairs import Pair
from .questions import Question, answered, check_template

log = logging.getLogger(__name__)


class Labelled(NamedTuple):
    """Labelled documents, each time anew: those that are measured, and those of the train split."""

    measured: Callable[[], Iterator[Document]]
    train: Callable[[], Iterator[Document]]


class Labels:
    """template: what a text is read in, at its {}; between: what stands between it and the word; separator: what stands
    between an example and what follows."""

    reads, families = "labelled", ("encoder", "decoder", "encoder-decoder")

    def __init__(
        self,
        n_shots: int = 0,
        seed: int = 0,
        template: str = "{}",
        between: str = " ",
        separator: str = "\n\n",
        words: Mapping[str, str] | str | None = None,
        batch_size: int = 16,
    ):
        self.n_shots, self.seed, self.template, self.between = n_shots, seed, check_template(template), between
        self.separator, self.words, self.batch_size = separator, words or {}, batch_size

    def __call__(self, net: nn.Module, texts: Labelled) -> dict[str, float]:
        """{"accuracy": value} over the measured texts that have a label, and their number."""
        labels = sorted({document.label for read in texts for document in read()} - {None})
        if len(labels) < 2:
            raise UserError(f"the labels of the data are {few(labels) or 'none'}: it takes two or more to choose from")
        words = spoken(labels, self.words, "measure.words")
        before = "".join(f"{self.read(document)}{self.between}{words[document.label]}{self.separator}"
                         for document in self.shots(texts.train))  # fmt: skip
        without = sum(document.label is None for document in texts.measured())
        if without:
            log.warning("%s texts have no label and are left out", f"{without:,}")

        def questions() -> Iterator[Question]:
            for number, document in enumerate(texts.measured(), 1):
                if document.label is not None:
                    text = before + self.read(document)
                    pairs = [Pair(text, words[label], self.between) for label in labels]
                    yield Question(f"text {number}", pairs, labels.index(document.label))

        right, n = 0, 0
        for question, found in answered(net, questions, self.batch_size):
            sums, n = [one.log_likelihood for one in found], n + 1
            right += sums.index(max(sums)) == question.truth
        return {"accuracy": right / n, "items": n}

    def read(self, document: Document) -> str:
        return self.template.replace("{}", document.text)

    def shots(self, train: Callable[[], Iterator[Document]]) -> list[Document]:
        """The examples, in the order that they were drawn in."""
        n_labelled = sum(document.label is not None for document in train()) if self.n_shots else 0
        if n_labelled < self.n_shots:
            raise UserError(f"measure.n_shots={self.n_shots}: the train split has {n_labelled} texts with a label")
        drawn = Random(self.seed).sample(range(n_labelled), self.n_shots)
        labelled = enumerate(document for document in train() if document.label is not None) if drawn else ()
        found = {number: document for number, document in labelled if number in drawn}
        return [found[number] for number in drawn]
