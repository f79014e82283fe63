"""Minimal pairs: of two sentences that differ in one thing, is the acceptable one the likelier (BLiMP: Warstadt et al.
2020, arXiv:1912.00582)?

A decoder is asked for the whole sentence after bos, an encoder for its pseudo-log-likelihood (Salazar et al. 2020,
arXiv:1910.14659). Two sentences that are equally likely are no right answer.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from .pairs import Pair
from .questions import Question, answered, check_differ, naming, records, text


class MinimalPairs:
    """JSON lines with a good and a bad sentence each; `groups` are fields by whose values accuracy is told as well,
    where a line has them."""

    reads, families = "records", ("encoder", "decoder")

    def __init__(
        self,
        good_field: str = "sentence_good",
        bad_field: str = "sentence_bad",
        groups: list[str] = ("field", "UID"),
        batch_size: int = 16,
    ):
        self.good_field, self.bad_field, self.groups, self.batch_size = good_field, bad_field, groups, batch_size

    def __call__(self, net: nn.Module, path: str | list[str]) -> dict[str, float]:
        """{metric: value} over the pairs in the files of `path`: accuracy and items, and GROUP=VALUE/ of both."""
        right, total = Counter(), Counter()
        for question, (good, bad) in answered(net, lambda: self.questions(path), self.batch_size):
            groups = ["", *(f"{group}/" for group in question.truth)]
            total.update(groups)
            right.update(groups if good.log_likelihood > bad.log_likelihood else ())
        return {f"{group}{metric}": value for group in sorted(total)
                for metric, value in (("accuracy", right[group] / total[group]), ("items", total[group]))}

    def questions(self, path: str | list[str]) -> Iterator[Question]:
        for place, record in records(path):
            with naming(place):
                sentences = [text(record, name) for name in (self.good_field, self.bad_field)]
                check_differ(sentences)
            pairs = [Pair("", sentence) for sentence in sentences]
            yield Question(place, pairs, [f"{name}={record[name]}" for name in self.groups if name in record])
