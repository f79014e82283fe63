"""The log-likelihood of a text after another: what each family reads of the two, and what it is asked.

    decoder           bos before text            each token of the text, from all before it
    encoder-decoder   before eos -> start text   each token of the text, and its eos
    encoder           bos before text eos        each token of the text, masked in turn while it sees all others: the
                                                 pseudo-log-likelihood of Salazar et al. 2020 (arXiv:1910.14659)

Where the two are one text they are cut as EleutherAI's lm-eval does it: white space at the end of the first belongs to
the second, and the second's tokens are those of the whole behind as many as the first has by itself. What is too long
for the net loses its beginning (an encoder reads the window around each token); a text that does not fit even alone is
refused.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from ..blocks.loss import IGNORED
from ..errors import UserError, few
from .scoring import Row, score


class Pair(NamedTuple):
    """A text that is asked for after what stands `before` it; where a net reads them as one, `between` joins them."""

    before: str
    text: str
    between: str = ""


class Likelihood(NamedTuple):
    """The sum of the log-probabilities of a text's tokens, and how many these are."""

    log_likelihood: float
    n_tokens: int


class Reader:
    """What a net reads of pairs. It counts those that are longer than the net (`n_cut`), and the texts in which the
    tokenizer knows not all (`n_unknown`)."""

    def __init__(self, net: nn.Module):
        self.tokenizer, self.family, self.length = net.tokenizer, net.family, net.max_len
        self.n_cut = self.n_unknown = 0
        roles = {"decoder": ["bos"], "encoder": ["mask"], "encoder-decoder": ["start", "eos"]}[self.family]
        self.tokenizer.require(*roles, task="likelihood")
        self.end = [] if self.tokenizer.eos is None else [self.tokenizer.eos]

    def ids(self, pair: Pair) -> tuple[list[int], list[int]]:
        """What stands before the text, and the text, as the net's ids. UserError for a text that cannot be asked."""
        tokenizer, room = self.tokenizer, self.length
        if self.family == "encoder-decoder":
            before, text = ([*tokenizer.encode(one), tokenizer.eos] for one in (pair.before, pair.text))
            n_read = len(before)
        else:
            before, text = cut_in_two(tokenizer, pair.before, pair.between + pair.text if pair.before else pair.text)
            before = before if tokenizer.bos is None else [tokenizer.bos, *before]
            n_read = len(before) + len(text) + (len(self.end) if self.family == "encoder" else -1)
        if not text:
            raise UserError(f"{few([pair.text])!r} adds no token of its own to what stands before it")
        if len(text) > room and self.family != "encoder":
            raise UserError(f"{few([pair.text])!r} has {len(text)} tokens, more than the {room} positions of the "
                            "model: make it shorter")
        self.n_cut += n_read > room
        self.n_unknown += tokenizer.unk is not None and tokenizer.unk in text
        return before, text

    def rows(self, pair: Pair, key: object) -> Iterator[Row]:
        """The rows by which the text's tokens are asked, each once."""
        before, text = self.ids(pair)
        if self.family == "encoder-decoder":
            yield Row([self.tokenizer.start, *text[:-1]], text, before[-self.length :], key)
        elif self.family == "decoder":
            yield continued(before, text, self.length, key)
        else:
            places = range(len(before), len(before) + len(text))
            yield from masked([*before, *text, *self.end], places, self.tokenizer.mask, self.length, key)


def cut_in_two(tokenizer, before: str, text: str) -> tuple[list[int], list[int]]:
    """The ids of two texts that stand side by side."""
    bare = before.rstrip()
    first = tokenizer.encode(bare)
    return first, tokenizer.encode(before + text)[len(first) :]


def continued(before: list[int], text: list[int], length: int, key: object = None) -> Row:
    """The row by which a decoder is asked for a text: no longer than `length`, the beginning left out."""
    whole = (before + text)[-length - 1 :]
    return Row(whole[:-1], [*[IGNORED] * (len(whole) - 1 - len(text)), *text], (), key)


def masked(ids: list[int], places: Iterable[int], mask: int, length: int, key: object = None) -> Iterator[Row]:
    """A row for each of the `places`, whose token is masked and asked for, in the window of `length` around it."""
    for place in places:
        begin = max(0, min(place - length // 2, len(ids) - length))
        row, labels = list(ids[begin : begin + length]), [IGNORED] * min(length, len(ids))
        row[place - begin], labels[place - begin] = mask, ids[place]
        yield Row(row, labels, (), key)


def likelihoods(net: nn.Module, pairs: Iterable[Pair], batch_size: int) -> Iterator[Likelihood]:
    """That of each pair, in their order."""
    reader = Reader(net)
    rows = (row for key, pair in enumerate(pairs) for row in reader.rows(pair, key))
    for _, parts in groupby(score(net, rows, batch_size), key=lambda scored: scored.key):
        each = torch.cat([part.log_probabilities for part in parts])
        yield Likelihood(each.sum().item(), len(each))
