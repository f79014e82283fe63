"""Span corruption: name what was cut out of a text (T5: Raffel et al. 2019, arXiv:1910.10683, section 3.1.4).

15 % of a row's tokens are noise, in spans of 3 on average. Each span is replaced by a sentinel; the target lists the
sentinels with what they stand for. Both end in eos, as in T5. The first span is <extra_id_0>:

    row      Thank you for inviting me to your party last week
    input    Thank you <extra_id_0> me to your party <extra_id_1> week eos
    target   <extra_id_0> for inviting <extra_id_1> last eos
    decoder  start <extra_id_0> for inviting <extra_id_1> last
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from ..errors import UserError
from ..filling import fill_spans
from .base import Task, generator, kept, stack, wrap


class Corruption:
    """Collator: noise drawn anew for each (seed, epoch, sample), whatever the batch or the worker.

    sentinels: ids, that of <extra_id_0> first; density: share of tokens that are noise; mean_span: tokens in a span, on
    average; anywhere: a span may also begin at the first token and need not end at the last (T5's rows always begin
    with a kept token and end with a noise span).
    """

    def __init__(
        self,
        sentinels: Sequence[int],
        start: int,
        eos: int,
        pad: int,
        density: float = 0.15,
        mean_span: float = 3.0,
        anywhere: bool = False,
    ):
        if not 0 < density < 1:
            raise UserError(f"task.density={density} is not between 0 and 1")
        if mean_span < 1:
            raise UserError(f"task.mean_span={mean_span} is below 1 token")
        self.sentinels, self.start, self.eos, self.pad = np.array(sentinels), start, eos, pad
        self.density, self.mean_span, self.anywhere = density, mean_span, anywhere

    def counts(self, n_tokens: int) -> tuple[int, int]:
        """Noise tokens and spans of a row: T5's rounding, and at least one of both and one kept token for each span."""
        n_noise = min(max(round(n_tokens * self.density), 1), n_tokens - 1)
        n_spans = max(round(n_noise / self.mean_span), 1)
        return n_noise, min(n_spans, n_tokens - n_noise)

    def window(self, row_length: int) -> tuple[int, int]:
        """How many tokens a row reads, and by how many rows advance: what fills the encoder's row_length exactly."""
        if row_length < 3:
            raise UserError(f"data.row_length={row_length} is too short for span corruption, which needs 3 tokens")
        raw = 2
        while self.lengths(raw + 1)[0] <= row_length:
            raw += 1
        n_spans = self.counts(raw)[1]
        if n_spans > len(self.sentinels):
            raise UserError(
                f"rows of {row_length} tokens hold {n_spans} spans, but the tokenizer has {len(self.sentinels)} "
                "sentinels: use a shorter data.row_length, a longer task.mean_span, or a tokenizer with more"
            )
        return raw, raw

    def lengths(self, n_tokens: int) -> tuple[int, int]:
        """Lengths of the encoder's input and of the target that a row of n_tokens >= 2 becomes."""
        n_noise, n_spans = self.counts(n_tokens)
        return n_tokens - n_noise + n_spans + 1, n_noise + n_spans + 1

    def __call__(self, examples: list[dict]) -> dict[str, Tensor]:
        """Rows of tokens (n,) -> input_ids (B, S), decoder_input_ids, labels (B, T), and masks where needed.

        A row of a single token has nothing to hide: it becomes a row without targets.
        """
        inputs, targets = zip(*map(self.corrupt, examples), strict=True)
        decoder = [np.append(self.start, target[:-1]) for target in targets]
        batch = {
            "input_ids": stack(inputs, self.pad),
            "decoder_input_ids": stack(decoder, self.pad),
            "labels": stack(targets, IGNORED),
        }
        for name, mask in (("attention_mask", kept(inputs)), ("decoder_attention_mask", kept(decoder))):
            if not mask.all():
                batch[name] = mask
        return batch

    def corrupt(self, example: dict) -> tuple[np.ndarray, np.ndarray]:
        """(input, target) of one row."""
        tokens = example["tokens"]
        if len(tokens) < 2:
            return np.append(tokens, self.eos), np.array([], dtype=np.int64)
        noise = self.noise(len(tokens), generator(*example["key"]))
        starts = noise & ~np.append(False, noise[:-1])
        sentinels = self.sentinels[: starts.sum()]
        inputs = np.where(starts, self.sentinels[np.maximum(starts.cumsum() - 1, 0)], tokens)[~noise | starts]
        target = np.insert(tokens[noise], np.flatnonzero(starts[noise]), sentinels)
        return np.append(inputs, self.eos), np.append(target, self.eos)

    def noise(self, n_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Which tokens are noise (n_tokens,): kept and noise segments by turns, of random lengths that add up."""
        n_noise, n_spans = self.counts(n_tokens)
        spans = segments(n_noise, n_spans, rng)
        if self.anywhere:  # one kept segment more; the outer two may be empty
            gaps = segments(n_tokens - n_noise + 2, n_spans + 1, rng)
            gaps[[0, -1]] -= 1
        else:
            gaps = np.append(segments(n_tokens - n_noise, n_spans, rng), 0)
        turns = np.append(np.stack([gaps[:-1], spans], 1).flatten(), gaps[-1])
        return np.repeat(np.arange(len(turns)) % 2 == 1, turns)


def segments(n_items: int, n_segments: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths (n_segments,) of segments, none empty, that n_items fall into; each partition is equally likely."""
    cuts = np.sort(rng.permutation(n_items - 1)[: n_segments - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [n_items]]))


class SpanCorruption(Task):
    """T5's objective, with teacher forcing. packing: `stream` or `single`; prompts: `{}` is a blank for `show`."""

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        density: float = 0.15,
        mean_span: float = 3.0,
        anywhere: bool = False,
        packing: str = "stream",
        prompts: Sequence[str] = (),
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        if packing == "isolate":
            raise UserError("data.packing=isolate: spans of span corruption cross documents; use stream or single")
        tokenizer.require("sentinels", "start", "eos", task="span_corruption")
        self.collator = Corruption(
            tokenizer.sentinels, tokenizer.start, tokenizer.eos, tokenizer.pad or 0, density, mean_span, anywhere
        )
        self.prompts = prompts

    def loss(self, batch: dict) -> dict[str, Tensor]:
        return self.net(
            batch["input_ids"],
            batch.get("attention_mask"),
            batch["decoder_input_ids"],
            batch.get("decoder_attention_mask"),
            readout=self.readout(batch["labels"]),
        )

    def show(self) -> str:
        """Blanks filled, each token the likeliest."""
        lines = ["Blanks filled (in brackets), each token the likeliest:"]
        for prompt in self.prompts:
            spans = fill_spans(self.net, self.tokenizer, prompt).values()
            lines.append(wrap(prompt.format(*(f"[{span}]" for span in spans)), "  "))
        return "\n".join(lines)
