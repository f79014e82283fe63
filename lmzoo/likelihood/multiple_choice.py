"""Multiple choice: which of its answers is the likeliest after a question (Brown et al. 2020, arXiv:2005.14165).

A longer answer is less likely for its length alone, so the answers are also compared by log-likelihood per byte of the
answer, as `acc_bytes` of EleutherAI's lm-eval does, and per token.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from ..errors import UserError
from .pairs import Pair
from .questions import Question, answered, check_differ, check_template, naming, records, text, value


class MultipleChoice:
    """JSON lines of questions: the text of a question, its answers, and the number of the right one, from 0.

    template: what a question is read in, at its {}; between: what stands between it and an answer, where a net reads
    both as one text.
    """

    reads, families = "records", ("encoder", "decoder", "encoder-decoder")

    def __init__(
        self,
        question_field: str = "question",
        choices_field: str = "choices",
        answer_field: str = "answer",
        template: str = "{}",
        between: str = " ",
        batch_size: int = 16,
    ):
        self.question_field, self.choices_field, self.answer_field = question_field, choices_field, answer_field
        self.template, self.between, self.batch_size = check_template(template), between, batch_size

    def __call__(self, net: nn.Module, path: str | list[str]) -> dict[str, float]:
        """{metric: value} over the questions in the files of `path`."""
        right, n = dict.fromkeys(("accuracy", "accuracy_per_byte", "accuracy_per_token"), 0), 0
        for question, found in answered(net, lambda: self.questions(path), self.batch_size):
            sums, n = [one.log_likelihood for one in found], n + 1
            n_bytes = [len(pair.text.encode()) for pair in question.pairs]
            for metric, lengths in zip(right, ([1] * len(sums), n_bytes, [one.n_tokens for one in found]), strict=True):
                scores = [total / length for total, length in zip(sums, lengths, strict=True)]
                right[metric] += scores.index(max(scores)) == question.truth
        return {metric: count / n for metric, count in right.items()} | {"items": n}

    def questions(self, path: str | list[str]) -> Iterator[Question]:
        for place, record in records(path):
            with naming(place):
                pairs, answer = self.question(record)
            yield Question(place, pairs, answer)

    def question(self, record: Mapping) -> tuple[list[Pair], int]:
        before = self.template.replace("{}", text(record, self.question_field))
        choices, answer = value(record, self.choices_field), value(record, self.answer_field)
        if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
            raise UserError(f"the field {self.choices_field} should be a list of texts, not {choices!r:.50}")
        check_differ(choices)
        if len(choices) < 2:
            raise UserError(f"{len(choices)} choices leave nothing to choose: give two or more, or leave the row out")
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise UserError(f"the field {self.answer_field} should be the number of the right choice, from 0 to "
                            f"{len(choices) - 1}, not {answer!r:.50}")
        return [Pair(before, choice, self.between) for choice in choices], answer
