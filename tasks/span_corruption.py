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
import torch
from torch import Tensor, nn

from ..blocks.loss import IGNORED
from ..decoding.filling import fill_spans
from ..draws import choose, draw
from ..errors import UserError
from .base import Task, keys, stack, wrap


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
        density: float,
        mean_span: float,
        anywhere: bool = False,
    ):
        if not 0 < density < 1:
            raise UserError(f"task.density={density} is not between 0 and 1")
        if mean_span < 1:
            raise UserError(f"task.mean_span={mean_span} is below 1 token")
        self.sentinels, self.start, self.eos, self.pad = np.array(sentinels), start, eos, pad
        self.density, self.mean_span, self.anywhere = density, mean_span, anywhere

    def counts(self, n_tokens: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Noise tokens and spans of a row: T5's rounding, and at least one of both and one kept token for each span.

        A row of fewer than two tokens has none.
        """
        n_noise = np.clip(np.rint(n_tokens * self.density), 1, np.maximum(n_tokens - 1, 0)).astype(int)
        n_spans = np.maximum(np.rint(n_noise / self.mean_span), np.minimum(n_noise, 1)).astype(int)
        return n_noise, np.minimum(n_spans, n_tokens - n_noise)

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
        rows = [row["tokens"] for row in examples]
        tokens, lengths = stack(rows, self.pad).numpy(), np.array([len(row) for row in rows])
        noise = self.noise(lengths, keys(examples))
        starts = noise.copy()
        starts[:, 1:] &= ~noise[:, :-1]
        sentinels = self.sentinels[np.maximum(starts.cumsum(1) - 1, 0)]
        kept_or_start = (np.arange(tokens.shape[1]) < lengths[:, None]) & (starts | ~noise)
        inputs, n_inputs = gather(np.where(starts, sentinels, tokens), kept_or_start, self.eos, self.pad)
        spans = np.stack([sentinels, tokens], 2).reshape(len(rows), -1)  # a span's sentinel before its first token
        named = np.stack([starts, noise], 2).reshape(len(rows), -1)
        labels, n_labels = gather(spans, named, np.where(lengths < 2, IGNORED, self.eos), IGNORED)
        decoder = np.insert(labels[:, :-1], 0, self.start, axis=1)
        read = {"": n_inputs, "decoder_": np.where(lengths < 2, 1, n_labels)}
        batch = {"input_ids": inputs, "decoder_input_ids": decoder, "labels": labels}
        for side, n in read.items():
            mask = np.arange(batch[f"{side}input_ids"].shape[1]) < n[:, None]
            batch[f"{side}input_ids"][~mask] = self.pad
            if not mask.all():
                batch[f"{side}attention_mask"] = mask.astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def noise(self, lengths: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Which tokens are noise (B, T): kept and noise segments by turns, of random lengths that add up."""
        n_tokens = max(1, lengths.max())
        n_noise, n_spans = self.counts(lengths)
        gaps, spans = np.moveaxis(draw(keys, n_tokens + 1, 2), 2, 0)
        spans = segments(n_noise, n_spans, spans)
        if self.anywhere:  # one kept segment more; the outer two are an item shorter, and so may be empty
            gaps = segments(lengths - n_noise + 2, n_spans + 1, gaps)[:, 1:]
        else:
            gaps = segments(lengths - n_noise, n_spans, gaps)
        turns = np.sort(np.concatenate([2 * gaps, 2 * spans + 1], 1), 1)[:, :n_tokens]
        return (turns % 2 == 1) & (np.arange(n_tokens) < lengths[:, None])


def segments(n_items: np.ndarray, n_segments: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The segment of each item (B, n + 1) that n_items (B,) fall into, none empty; each partition is equally likely.

    numbers: drawn ones (B, n), one for each place between two items. Beyond the items stands a segment after all.
    """
    cuts = choose(numbers, np.arange(numbers.shape[1]) < n_items[:, None] - 1, n_segments - 1)
    segment = np.insert(cuts.cumsum(1), 0, 0, axis=1)
    return np.where(np.arange(segment.shape[1]) < n_items[:, None], segment, segment.shape[1])


def gather(
    values: np.ndarray, chosen: np.ndarray, closing: int | np.ndarray, fill: int
) -> tuple[np.ndarray, np.ndarray]:
    """The chosen of values (B, n) moved to the left of each row, `closing` behind them; the rows' lengths (B,)."""
    lengths = chosen.sum(1)
    gathered = np.full((len(values), lengths.max() + 1), fill)
    gathered[np.arange(gathered.shape[1]) < lengths[:, None]] = values[chosen]
    gathered[np.arange(len(values)), lengths] = closing
    return gathered, lengths + 1


class SpanCorruption(Task):
    """T5's objective, with teacher forcing."""

    def __init__(
        self,
        net: nn.Module,
        tokenizer,
        *args,
        density: float = 0.15,
        mean_span: float = 3.0,
        anywhere: bool = False,
        **settings,
    ):
        super().__init__(net, tokenizer, *args, **settings)
        if self.isolated:
            raise UserError(f"data.packing={self.packing}: spans of span corruption cross documents; "
                            "use stream or single")
        tokenizer.require("sentinels", "start", "eos", task="span_corruption")
        self.collator = Corruption(
            tokenizer.sentinels, tokenizer.start, tokenizer.eos, tokenizer.pad or 0, density, mean_span, anywhere
        )

    def loss(self, batch: dict) -> dict[str, Tensor]:
        return self.net(
            batch["input_ids"],
            batch.get("attention_mask"),
            batch["decoder_input_ids"],
            batch.get("decoder_attention_mask"),
            readout=self.readout(batch["labels"]),
        )

    def show(self) -> str:
        """Blanks filled."""
        texts = self.blanks(n_words=2)
        lines = ["Blanks filled (in brackets), each token the likeliest:"] if texts else []
        for prompt, truth in texts:
            spans = fill_spans(self.net, self.tokenizer, prompt).values()
            lines.append(wrap(prompt.format(*(f"[{span}]" for span in spans)), "  "))
            if truth:
                lines.append(wrap(f"(it was {', '.join(f'[{span}]' for span in truth)})", "      "))
        return "\n".join(lines)
