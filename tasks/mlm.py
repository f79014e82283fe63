"""Masked language modelling: restore tokens from both sides (BERT: Devlin et al. 2018, arXiv:1810.04805).

Of the row's ordinary tokens 15 % are chosen; of these 80 % become the mask token, 10 % a random token, 10 % stay.
As in BERT's own data code the number chosen is exact, max(1, round(rate * n)), so every row has a target; each choice
of that size is equally likely, and what happens to a chosen token is drawn independently. Masks are new in each epoch
(RoBERTa: Liu et al. 2019, arXiv:1907.11692). Under whole-word masking all pieces of a word share one decision (BERT's
release of May 2019; for Chinese: Cui et al. 2019, arXiv:1906.08101).
"""

from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from ..decoding.filling import fill_masks
from ..draws import choose, draw, uniform
from ..errors import UserError
from .base import Task, kept, keys, stack, wrap


class Masking:
    """Collator: masks drawn anew for each (seed, epoch, sample), whatever the batch or the worker.

    ordinary: for each id (V,) whether it may be chosen or drawn, as all but the special ones may; mask: id of the mask
    token; rate: share of tokens chosen; masked, random: shares of the chosen that become the mask token, or a random
    one (the rest stay as they are); whole_word: choose words by `word_starts`; isolate: no document sees another.
    """

    def __init__(
        self,
        ordinary: np.ndarray,
        mask: int,
        pad: int,
        rate: float,
        masked: float,
        random: float,
        whole_word: bool = False,
        isolate: bool = False,
    ):
        if not 0 < rate <= 1:
            raise UserError(f"task.rate={rate} is not above 0 and at most 1")
        if min(masked, random) < 0 or masked + random > 1:
            raise UserError(f"task.masked={masked} and task.random={random} are not two shares of 1")
        self.ordinary, self.drawable, self.mask, self.pad = ordinary, np.flatnonzero(ordinary), mask, pad
        self.rate, self.masked, self.random = rate, masked, random
        self.whole_word, self.isolate = whole_word, isolate

    def window(self, row_length: int) -> tuple[int, int]:
        """How many tokens a row reads, and by how many rows advance."""
        return row_length, row_length

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Rows of tokens (n,) -> input_ids, labels (B, T) and, where needed, attention_mask, document_ids (B, T)."""
        rows = [row["tokens"] for row in examples]
        tokens, mask = stack(rows, self.pad).numpy(), kept(rows)
        ordinary = self.ordinary[tokens] & mask.numpy().astype(bool)
        starts = ordinary.copy()
        if self.whole_word:  # a word goes on where no word starts and the token before was ordinary too
            word_starts = stack([row["word_starts"] for row in examples], 0).numpy().astype(bool)
            starts[:, 1:] &= word_starts[:, 1:] | ~ordinary[:, :-1]
        inputs, labels = self.corrupt(tokens, ordinary, starts, draw(keys(examples), tokens.shape[1], 3))
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if not mask.all():
            batch["attention_mask"] = mask
        if self.isolate:
            batch["document_ids"] = stack([row["document_ids"] for row in examples], -1)
        return batch

    def corrupt(
        self, tokens: np.ndarray, ordinary: np.ndarray, starts: np.ndarray, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) from tokens, all (B, T), and drawn numbers (B, T, 3).

        A unit, which is chosen and altered as one, begins at `starts` and goes on over ordinary tokens.
        """
        choice, fate, drawn = np.moveaxis(numbers, 2, 0)
        n_units = starts.sum(1)
        chosen = choose(choice, starts, np.minimum(np.maximum(np.rint(self.rate * n_units), 1).astype(int), n_units))
        first = np.maximum.accumulate(np.where(starts, np.arange(tokens.shape[1]), 0), 1)  # place of the token's unit
        target = np.take_along_axis(chosen, first, 1) & ordinary
        fate = np.take_along_axis(uniform(fate), first, 1)
        altered = np.where(fate < self.masked, self.mask, self.drawable[drawn % np.uint64(len(self.drawable))])
        inputs = np.where(target & (fate < self.masked + self.random), altered, tokens)
        return inputs, np.where(target, tokens, IGNORED)


class MaskedLM(Task):
    """Masked language modelling; the head runs at the masked positions only."""

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        rate: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
        whole_word: bool = False,
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        tokenizer.require("mask", task="mlm")
        ordinary = ~np.isin(np.arange(len(tokenizer)), list(tokenizer.special_ids))
        self.collator = Masking(
            ordinary, tokenizer.mask, tokenizer.pad or 0, rate, masked, random, whole_word, self.isolated
        )

    def show(self) -> str:
        """Blanks filled with the three likeliest tokens."""
        texts = self.blanks(n_words=1)
        lines = ["Blanks filled (the three likeliest tokens, with their probabilities):"] if texts else []
        for prompt, truth in texts:
            lines.append(wrap(prompt.replace("{}", "____"), "  "))
            blanks = fill_masks(self.net, self.tokenizer, prompt, top=3)
            for guesses, word in zip_longest(blanks, truth[: len(blanks)]):
                line = "   ".join(f"{token} {probability:.2f}" for token, probability in guesses)
                lines.append(f"      {line}" + (f"   (it was {word})" if word else ""))
        return "\n".join(lines)
