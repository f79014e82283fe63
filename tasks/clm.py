"""Causal language modelling: predict each token from those before it (GPT: Radford et al. 2018).

A document is `bos t1 .. tn eos`. A row reads T + 1 tokens and rows advance by T, so that over the cuts between rows
each of t1 .. tn and eos is a target exactly once. What follows eos is no target: no document predicts the next one.

    document 0 0 0 1 1 1       with row_length 5, packed documents `b x e` and `b y e`
    tokens   b x e b y e
    inputs   b x e b y         (may see across the border in `stream` packing, only their own document in `isolate`)
    labels   x e . y e         (. is -100)
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from .base import Task, kept, stack, wrap

N_CONTINUED = 60  # tokens that `show` adds to a prompt


class Shift:
    """Collator: labels are the inputs' next tokens. This is the one place where anything is shifted.

    Borders are known by the document ids and padding by the row's length, never by a token's id: bos, eos and pad may
    all be one token. `isolate` hands the document ids on, so that no document sees another.
    """

    def __init__(self, pad: int, isolate: bool):
        self.pad, self.isolate = pad, isolate

    def window(self, row_length: int) -> tuple[int, int]:
        """How many tokens a row reads, and by how many rows advance."""
        return row_length + 1, row_length

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Rows of tokens (n,) -> input_ids, labels (B, T) and, where needed, attention_mask, document_ids (B, T)."""
        inputs = [row["tokens"][:-1] for row in examples]
        borders = [np.diff(row["document_ids"]) != 0 for row in examples]
        labels = [np.where(border, IGNORED, row["tokens"][1:]) for row, border in zip(examples, borders, strict=True)]
        batch = {"input_ids": stack(inputs, self.pad), "labels": stack(labels, IGNORED)}
        mask = kept(inputs)
        if not mask.all():
            batch["attention_mask"] = mask
        if self.isolate:
            batch["document_ids"] = stack([row["document_ids"][:-1] for row in examples], -1)
        return batch


class CausalLM(Task):
    """Next-token prediction. packing: `stream`, `isolate` or `single`, as the data is packed; prompts: for `show`."""

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        packing: str = "stream",
        prompts: Sequence[str] = (),
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        tokenizer.require("bos", "eos", task="clm")
        self.collator = Shift(pad=tokenizer.pad or 0, isolate=packing == "isolate")
        self.prompts = prompts

    def summarise(self, sums: dict[str, float], split: str) -> dict[str, float]:
        """And bits per byte: all nats, those of eos too, over ln 2 and the UTF-8 bytes of the raw text."""
        metrics = super().summarise(sums, split)
        data = self.trainer.datamodule
        if data is not None and self.whole(split):
            metrics["bits_per_byte"] = sums["nll"] / (math.log(2) * data.n_bytes(split))
        return metrics

    def show(self) -> str:
        """Prompts continued, each token the likeliest."""
        lines = ["Prompts (in brackets) continued, each token the likeliest:"]
        for prompt in self.prompts:
            ids = [self.tokenizer.bos, *self.tokenizer.encode(prompt)]
            rows = torch.tensor([ids], device=self.device)
            n = min(N_CONTINUED, (self.net.max_positions or math.inf) - len(ids))
            answer = self.net.generate(rows, max_new_tokens=n, eos=self.tokenizer.eos)[0, len(ids) :]
            lines.append(wrap(f"[{prompt}]{self.tokenizer.decode(answer.tolist())}", "  "))
        return "\n".join(lines)
