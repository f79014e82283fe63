"""Questions whose answers are texts: JSON lines that hold them, and the likelihood of every answer.

All questions are looked through before the first is put to the net, so that a mistake in the last line costs nothing.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, tee
from typing import Any, NamedTuple

from torch import nn
from tqdm import tqdm

from ..data.corpus import json_object
from ..data.labelled import storable
from ..data.opening import Piece, files, lines, opened, stat
from ..errors import UserError, few
from .pairs import Likelihood, Pair, Reader, likelihoods

log = logging.getLogger(__name__)


class Question(NamedTuple):
    """The texts of which one is the answer, each after what stands before it; `truth` is the caller's, `place` says
    where the question is from."""

    place: str
    pairs: list[Pair]
    truth: Any


def answered(
    net: nn.Module, questions: Callable[[], Iterator[Question]], batch_size: int
) -> Iterator[tuple[Question, list[Likelihood]]]:
    """Each question with the likelihoods of its texts; `questions` is called twice."""
    n_questions = n_unknown = n_cut = 0
    for question in questions():
        reader = Reader(net)
        with naming(question.place):
            for pair in question.pairs:
                reader.ids(pair)
        n_questions += 1
        n_unknown += reader.n_unknown > 0
        n_cut += reader.n_cut > 0
    if not n_questions:
        raise UserError("there is nothing to measure: no text that would be has a label")
    if n_unknown:
        log.warning("%s of %s items hold signs or words for which the tokenizer has no token", f"{n_unknown:,}",
                    f"{n_questions:,}")
    if n_cut:
        log.warning("%s of %s items are longer than the %s positions of the model, which reads %s", f"{n_cut:,}",
                    f"{n_questions:,}", f"{net.max_len:,}",
                    "what is around each token" if net.family == "encoder" else "only their end")
    ours, theirs = tee(questions())
    found = likelihoods(net, (pair for question in theirs for pair in question.pairs), batch_size)
    for question in tqdm(ours, "questions", n_questions, disable=None, leave=False):
        yield question, list(islice(found, len(question.pairs)))


def records(path: str | list[str] | None) -> Iterator[tuple[str, dict]]:
    """(where it stands, object) of each line of files of JSON lines; blank lines are passed over."""
    for file in files(path):
        piece, empty = Piece(str(file), n_bytes=stat(file).st_size), True
        with opened(piece) as stream:
            for number, (_, line) in enumerate(lines(stream, piece), 1):
                if line.strip():
                    empty = False
                    with naming(place := f"{file} line {number}"):
                        found = record(line)
                    yield place, found
        if empty:
            raise UserError(f"{file} holds no questions, only empty lines")


def record(line: str) -> dict:
    try:
        found = json_object(line)
        storable(json.dumps(found, ensure_ascii=False), "line")
    except ValueError as error:
        raise UserError(str(error)) from error
    return found


def text(record: Mapping, name: str) -> str:
    """The text in a field; UserError where there is none."""
    found = value(record, name)
    if not isinstance(found, str) or not found.strip():
        raise UserError(f"the field {name} should be a text, not {found!r:.50}")
    return found


def check_differ(texts: Sequence[str]) -> None:
    """UserError where two of the texts to choose from are the same."""
    if again := next((one for place, one in enumerate(texts) if one in texts[:place]), None):
        raise UserError(f"{few([again])!r} is there twice, and equal texts are equally likely: leave the item out, or "
                        "mend it")


def value(record: Mapping, name: str) -> Any:
    if name not in record:
        raise UserError(f"no field {name}; the fields are {few(record) or 'none'}")
    return record[name]


def check_template(template: str) -> str:
    """What a text is read in; UserError where it has no place for one."""
    if template.count("{}") != 1:
        raise UserError(f"measure.template={template!r} has no place, or more than one, for the text: write {{}} once")
    return template


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Let a user's mistake say where it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
