"""Pairs of texts made up by a rule, which a net that reads and writes can learn: to see whether it works at all.

    copy       kxwq    -> kxwq
    reverse    kxwq    -> qwxk
    addition   47+85   -> 132
"""

from collections.abc import Iterator
from string import ascii_lowercase
from typing import Literal

import numpy as np

from ..errors import UserError
from .labelled import Document

SPLITS = ("train",) * 8 + ("val", "test")


def read_exercise(
    path: None = None, rule: Literal["copy", "reverse", "addition"] = "copy", n_texts: int = 20_000, shortest: int = 4,
    longest: int = 12, n_digits: int = 2, seed: int = 0,
) -> Iterator[Document]:  # fmt: skip
    """`n_texts` different texts of `shortest` to `longest` letters, or all sums of two numbers of `n_digits` digits.

    A tenth of them is for validation and a tenth for the test, chosen at random.
    """
    if path:
        raise UserError(f"data.path={path}: an exercise is made up and reads nothing; leave it out")
    draw = np.random.default_rng(seed)
    pairs = _sums(n_digits) if rule == "addition" else _words(rule, n_texts, shortest, longest, draw)
    for text, answer in pairs:
        yield Document(text, split=SPLITS[draw.integers(10)], second=answer)


def _sums(n_digits: int) -> Iterator[tuple[str, str]]:
    numbers = range(10 ** (n_digits - 1) if n_digits > 1 else 0, 10**n_digits)
    return ((f"{a}+{b}", str(a + b)) for a in numbers for b in numbers)


def _words(rule: str, n_texts: int, shortest: int, longest: int, draw) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    while len(seen) < n_texts:
        letters = draw.integers(26, size=draw.integers(shortest, longest + 1))
        text = "".join(ascii_lowercase[letter] for letter in letters)
        if text not in seen:
            seen.add(text)
            yield text, text[::-1] if rule == "reverse" else text
