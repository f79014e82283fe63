"""So many labelled texts of each class, to learn from few (`data.per_class`).

Texts come in a random order, a permutation keyed by the seed, and one is taken if any class of it lacks examples yet:
the greedy sampling of Yang and Katiyar (2020, arXiv:2010.02405). Of texts with one class each these are exactly so many
of every class that has them, and more of them hold the fewer.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator

import numpy as np

from ..errors import UserError
from .sampler import permute
from .shards import UNTAGGED, Split


def few_of_each(classes: Callable[[int], Collection], n_texts: int, n: int, seed: int) -> tuple[np.ndarray, Counter]:
    """Which of `n_texts` texts are taken so that each of their `classes` has n, in order; and how many each has."""
    taken, counts = [], Counter()
    for text in permute(np.arange(n_texts), n_texts, (seed,)).tolist():
        own = set(classes(text))
        if any(counts[one] < n for one in own):
            taken.append(text)
            counts.update(own)
    return np.sort(np.array(taken, np.int64)), counts


class Few:
    """Those documents of a split that are n of each class, as a split of their own; `fewer`: {name of a class: how many
    there are} where there are not so many."""

    def __init__(self, split: Split, n: int, seed: int):
        if split.kind not in ("class", "classes", "tags"):
            raise UserError(f"data.per_class={n}: labels of the kind {split.kind} are no classes")
        self.made_of, self.whole = (split, n, seed), split
        self.documents, counts = few_of_each(self._classes, split.n_documents, n, seed)
        self.n_documents = len(self.documents)
        self.n_tokens = sum(int(lengths.sum()) for lengths in self.lengths())
        self.labels = [split.names[one] for one in sorted(counts)]
        self.fewer = {split.names[one]: counts[one] for one in sorted(counts) if counts[one] < n}

    def __reduce__(self):
        return Few, self.made_of

    def __getattr__(self, word: str):
        return getattr(self.whole, word)

    def _classes(self, document: int) -> Collection[int]:
        if self.whole.kind == "tags":
            return {*self.whole.tags(*self.whole.span(document)).tolist()} - {UNTAGGED}
        label = self.whole.label(document)
        return label if isinstance(label, list) else () if label is None else (label,)

    def label(self, document: int) -> int | list[int] | None:
        return self.whole.label(self.documents[document])

    def second(self, document: int) -> int:
        return self.whole.second(self.documents[document])

    def span(self, document: int) -> tuple[int, int]:
        return self.whole.span(self.documents[document])

    def lengths(self) -> Iterator[np.ndarray]:
        yield np.array([end - begin for begin, end in map(self.whole.span, self.documents)], np.int64)
