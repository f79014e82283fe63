"""Conversations: a decoder learns what the assistant says in each of its turns, and nothing else.

What a conversation is as a text, its chat template says (`lmzoo/tokenizer/chat.py`).

    tokens    U h i E A o k E U b y e E A s o E        U: the user speaks, A: the assistant, E: the end of a turn
    inputs    U h i E A o k E U b y e E A s o
    labels    . . . . o k E . . . . . . s o E
"""

import numpy as np
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from .base import kept, stack
from .downstream import DocumentsInRows
from .seq2seq import Seq2Seq


class Turns(DocumentsInRows):
    """Collator: a conversation a row."""

    def __init__(self, pad: int):
        self.pad = pad

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Conversations (n,) -> input_ids, attention_mask, labels (B, T), sample (B,): the row's place in its split."""
        inputs = [row["tokens"][:-1] for row in examples]
        labels = [np.where(row["written"][1:], row["tokens"][1:], IGNORED) for row in examples]
        return {"input_ids": stack(inputs, self.pad), "attention_mask": kept(inputs),
                "labels": stack(labels, IGNORED), "sample": self.samples(examples)}


class Chat(Seq2Seq):
    """Teacher forcing of all turns of the assistant; the net itself writes the last, which is compared."""

    def __init__(self, net: nn.Module, tokenizer, *args, **settings):
        super().__init__(net, tokenizer, *args, **settings)
        self.eos, self.collator = tokenizer.chat.eos, Turns(tokenizer.pad or 0)
