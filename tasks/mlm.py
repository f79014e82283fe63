"""Masked language modelling: restore tokens from both sides (BERT: Devlin et al. 2018, arXiv:1810.04805).

Of the row's ordinary tokens 15 % are chosen; of these 80 % become the mask token, 10 % a random token, 10 % stay.
As in BERT's own data code the number chosen is exact, max(1, round(rate * n)), so every row has a target; each choice
of that size is equally likely, and what happens to a chosen token is drawn independently. Masks are new in each epoch
(RoBERTa: Liu et al. 2019, arXiv:1907.11692). Under whole-word masking all pieces of a word share one decision (BERT's
release of May 2019; for Chinese: Cui et al. 2019, arXiv:1906.08101).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from ..errors import UserError
from ..filling import fill_masks
from .base import Task, generator, kept, stack, wrap


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
        rate: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
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
        inputs, labels = zip(*map(self.corrupt, examples), strict=True)
        batch = {"input_ids": stack(inputs, self.pad), "labels": stack(labels, IGNORED)}
        mask = kept(inputs)
        if not mask.all():
            batch["attention_mask"] = mask
        if self.isolate:
            batch["document_ids"] = stack([row["document_ids"] for row in examples], -1)
        return batch

    def corrupt(self, example: dict) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, labels) of one row, both (n,). A unit is a token, or a word, that is made of ordinary tokens."""
        rng, tokens = generator(*example["key"]), example["tokens"]
        ordinary = self.ordinary[tokens]
        starts = ordinary.copy()
        if self.whole_word:  # a word goes on where no word starts and the token before was ordinary too
            starts[1:] &= example["word_starts"][1:] | ~ordinary[:-1]
        n_units = int(starts.sum())
        if n_units == 0:
            return tokens, np.full_like(tokens, IGNORED)
        chosen = np.zeros(n_units, dtype=bool)
        chosen[rng.permutation(n_units)[: max(1, round(self.rate * n_units))]] = True
        fate = rng.random(n_units)
        unit = np.maximum(starts.cumsum() - 1, 0)  # of each token; special ones are left out by `ordinary`
        target = chosen[unit] & ordinary
        inputs = tokens.copy()
        drawn = self.drawable[rng.integers(len(self.drawable), size=len(tokens))]
        to_mask = target & (fate[unit] < self.masked)
        to_draw = target & ~to_mask & (fate[unit] < self.masked + self.random)
        inputs[to_mask], inputs[to_draw] = self.mask, drawn[to_draw]
        return inputs, np.where(target, tokens, IGNORED)


class MaskedLM(Task):
    """Masked language modelling; the head runs at the masked positions only. prompts: `{}` is a blank for `show`."""

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        rate: float = 0.15,
        masked: float = 0.8,
        random: float = 0.1,
        whole_word: bool = False,
        packing: str = "stream",
        prompts: Sequence[str] = (),
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        tokenizer.require("mask", task="mlm")
        ordinary = ~np.isin(np.arange(len(tokenizer)), list(tokenizer.special_ids))
        isolate = packing == "isolate"
        self.collator = Masking(ordinary, tokenizer.mask, tokenizer.pad or 0, rate, masked, random, whole_word, isolate)
        self.prompts = prompts

    def show(self) -> str:
        """Blanks filled, with the three likeliest tokens of each and their probabilities."""
        lines = ["Blanks filled (the three likeliest tokens, with their probabilities):"]
        for prompt in self.prompts:
            lines.append(wrap(prompt.replace("{}", "____"), "  "))
            for guesses in fill_masks(self.net, self.tokenizer, prompt, top=3):
                lines.append("      " + "   ".join(f"{token} {probability:.2f}" for token, probability in guesses))
        return "\n".join(lines)
