"""What a tokenizer does not know of a text: the tokens that stand for any sign or word that it has no other for."""

from collections.abc import Mapping

import numpy as np

from .shards import Joined, Split

SAMPLES, SAMPLED = 64, 1 << 17  # stretches of a split in which they are counted, and the tokens of each
TOLD = 0.01  # the share above which it is worth a word


def share(split: Split | Joined, unk: int | None) -> float:
    """The share of `unk` among a split's tokens: in `SAMPLES` stretches from all over a large one, else in all."""
    step = max(SAMPLED, split.n_tokens // SAMPLES)
    found = [split.read(begin, begin + SAMPLED) == unk for begin in range(0, split.n_tokens, step)]
    return sum(map(np.count_nonzero, found)) / max(1, sum(map(len, found)))


def told(splits: Mapping[str, Split | Joined], unk: int | None) -> str:
    """A line for a user whose tokenizer knows too little of the `splits`; empty where that is not so."""
    shares = {name: share(split, unk) for name, split in splits.items()} if unk is not None else {}
    many = [f"{part:.1%} of the tokens of {name}" for name, part in shares.items() if part > TOLD]
    return f"{', '.join(many)} are unknown to the tokenizer, and all alike to the net" if many else ""
