"""Causal language modelling: predict each token from those before it (GPT: Radford et al. 2018).

A document is `bos t1 .. tn eos`. A row reads T + 1 tokens and rows advance by T, so that over the cuts between rows
each of t1 .. tn and eos is a target exactly once. What follows eos is no target: no document predicts the next one.

    document 0 0 0 1 1 1       with row_length 5, packed documents `b x e` and `b y e`
    tokens   b x e b y e
    inputs   b x e b y         (may see across the border in `stream` packing, only their own document in `isolate`)
    labels   x e . y e         (. is -100)

In `fit` packing a row holds whole documents, and an eos that nothing reads is no input: b x b y, with labels x e y e.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from .base import Task, kept, stack, wrap

N_CONTINUED = 60  # tokens that `show` adds to a prompt


class Shift:
    """Collator: labels are the inputs' next tokens. This is the one place where anything is shifted.

    Borders are known by the document ids and padding by the row's length, never by a token's id: bos, eos and pad may
    all be one token. `isolate` hands the document ids on, so that no document sees another; `fit` leaves out inputs
    without a target, the last tokens of documents.
    """

    def __init__(self, pad: int, isolate: bool, fit: bool = False):
        self.pad, self.isolate, self.fit = pad, isolate, fit

    def window(self, row_length: int) -> tuple[int, int]:
        """How many tokens a row reads, and by how many rows advance."""
        return row_length + 1, row_length

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Rows of tokens (n,) -> input_ids, labels (B, T) and, where needed, attention_mask, document_ids (B, T)."""
        inputs, labels, documents = [], [], []
        for row in examples:
            tokens, ids = row["tokens"], row["document_ids"]
            goes_on = ids[1:] == ids[:-1]
            read = goes_on if self.fit else slice(None)
            inputs.append(tokens[:-1][read])
            labels.append(np.where(goes_on, tokens[1:], IGNORED)[read])
            documents.append(ids[:-1][read])
        batch = {"input_ids": stack(inputs, self.pad), "labels": stack(labels, IGNORED)}
        mask = kept(inputs)
        if not mask.all():
            batch["attention_mask"] = mask
        if self.isolate:
            batch["document_ids"] = stack(documents, -1)
        return batch


class CausalLM(Task):
    """Next-token prediction."""

    def __init__(self, net: nn.Module, tokenizer, *args, **settings):
        super().__init__(net, tokenizer, *args, **settings)
        tokenizer.require("bos", "eos", task="clm")
        self.collator = Shift(tokenizer.pad or 0, self.isolated, fit=self.packing == "fit")

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """And bits per byte: all nats, those of eos too, over ln 2 and the UTF-8 bytes of the raw text."""
        metrics = super().summarise(sums, split)
        if self.whole(split):
            metrics["bits_per_byte"] = sums["nll"] / (math.log(2) * self.trainer.datamodule.n_bytes(split))
        return metrics

    def show(self) -> str:
        """Prompts, or beginnings of held-out documents, continued."""
        prompts = self.prompts or self.held_out(n_words=6)
        lines = ["Beginnings (in brackets) continued, each token the likeliest:"] if prompts else []
        for prompt in prompts:
            ids = [self.tokenizer.bos, *self.tokenizer.encode(prompt)]
            rows = torch.tensor([ids], device=self.device)
            n = min(N_CONTINUED, (self.net.max_positions or math.inf) - len(ids))
            answer = self.net.generate(rows, max_new_tokens=n, eos=self.tokenizer.eos)[0, len(ids) :]
            lines.append(wrap(f"[{prompt}]{self.tokenizer.decode(answer.tolist())}", "  "))
        return "\n".join(lines)
