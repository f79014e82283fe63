"""Perplexity and bits per byte of documents, by a window that slides over each.

A window reads `max_len` tokens of a document `bos t1 .. tn eos` and begins `stride` tokens after the one before; of its
predictions those count that no window has made yet. So each of t1 .. tn and eos is predicted exactly once, after the
first window from max_len - stride tokens or more. A small stride tells what the net makes of a long text as a whole, at
max_len / stride times the cost; with stride = max_len windows do not overlap. Perplexities compare nets of one
tokenizer; bits per byte (all nats, those of eos too, over ln 2 and the UTF-8 bytes of the raw text) compare any.
"""

import math
from collections.abc import Iterator

from torch import nn
from tqdm import tqdm

from ..blocks.loss import IGNORED, perplexity
from ..errors import UserError
from .scoring import Row, score


class SlidingWindow:
    """stride: null for half of max_len; max_len: null for the net's own, which nets without learned positions may
    exceed."""

    reads, families = "documents", ("decoder",)

    def __init__(self, stride: int | None = None, max_len: int | None = None, batch_size: int = 16):
        self.stride, self.max_len, self.batch_size = stride, max_len, batch_size

    def check(self, net: nn.Module) -> None:
        """UserError for windows that the net cannot read, or that would leave tokens out."""
        length, limit = self.max_len or net.max_len, net.max_positions
        if limit is not None and length > limit:
            raise UserError(f"measure.max_len={length} is more than the {limit} positions of the model: give fewer")
        if self.stride is not None and not 1 <= self.stride <= length:
            raise UserError(f"measure.stride={self.stride} must be between 1 and the window's length, {length}")
        net.tokenizer.require("bos", "eos", task="sliding_window")

    def __call__(self, net: nn.Module, documents) -> dict[str, float]:
        """{metric: value} over `documents`, those of a split of a token store."""
        nats, n = 0.0, 0
        with tqdm(total=documents.n_tokens, desc="tokens", unit_scale=True, disable=None, leave=False) as bar:
            for scored in score(net, self.windows(documents, self.max_len or net.max_len), self.batch_size):
                nats -= scored.log_probabilities.sum().item()
                n += len(scored.log_probabilities)
                bar.update(len(scored.log_probabilities))
        loss = nats / n
        return {"loss": loss, "perplexity": perplexity(loss),
                "bits_per_byte": nats / (math.log(2) * documents.n_bytes), "tokens": n}  # fmt: skip

    def windows(self, documents, length: int) -> Iterator[Row]:
        stride = self.stride or max(1, length // 2)
        for document in range(documents.n_documents):
            begin, end = documents.span(document)
            predicted = begin + 1  # the next token that no window has predicted
            while predicted < end:
                tokens = documents.read(begin, min(begin + length + 1, end)).tolist()
                labels = [IGNORED] * (predicted - begin - 1) + tokens[predicted - begin :]
                yield Row(tokens[:-1], labels)
                begin, predicted = begin + stride, begin + len(tokens)
