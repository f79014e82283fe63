"""Pseudo-perplexity of documents for encoders (Salazar et al. 2020, arXiv:1910.14659).

Each token of a document is masked in turn, and predicted from all others; a document that is longer than the net is
read in the window that has the token in its middle. PPPL = exp(-the mean log-probability) over all tokens but bos and
eos. It costs a forward pass for each token, and compares nets of one tokenizer.
"""

from collections.abc import Iterator

from torch import nn
from tqdm import tqdm

from ..blocks.loss import perplexity
from .pairs import masked
from .scoring import Row, score


class PseudoPerplexity:
    """And how many of the masked tokens are the net's first guess."""

    reads, families = "documents", ("encoder",)

    def __init__(self, batch_size: int = 64):
        self.batch_size = batch_size

    def check(self, net: nn.Module) -> None:
        net.tokenizer.require("mask", task="pseudo_perplexity")

    def __call__(self, net: nn.Module, documents) -> dict[str, float]:
        """{metric: value} over `documents`, those of a split of a token store."""
        nats, correct, n = 0.0, 0, 0
        rows = self.rows(net, documents)
        for scored in tqdm(score(net, rows, self.batch_size), "tokens", documents.n_tokens, unit_scale=True,
                           disable=None, leave=False):  # fmt: skip
            nats -= scored.log_probabilities.sum().item()
            correct, n = correct + int(scored.likeliest.sum()), n + 1
        loss = nats / n
        return {"loss": loss, "pseudo_perplexity": perplexity(loss), "accuracy": correct / n, "tokens": n}

    def rows(self, net: nn.Module, documents) -> Iterator[Row]:
        tokenizer = net.tokenizer
        first, last = tokenizer.bos is not None, tokenizer.eos is not None
        for document in range(documents.n_documents):
            ids = documents.read(*documents.span(document)).tolist()
            yield from masked(ids, range(first, len(ids) - last), tokenizer.mask, net.max_len)
