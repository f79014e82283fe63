"""Continue rows of tokens, one token at a time.

Each step reads only what is new, since the model's cache holds the keys and values of all earlier tokens. Rows of
unequal length are padded, and each row gives what it gives alone. Top-k sampling: Fan et al. 2018 (arXiv:1805.04833);
nucleus, or top-p: Holtzman et al. 2019 (arXiv:1904.09751).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .blocks.head import Pooler
from .errors import UserError


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 64,
    *,
    eos: int | None = None,
    start: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    forbidden: Iterable[int] = (),
) -> Tensor:
    """input_ids (B, T) -> the decoder's rows (B, T + n), n <= max_new_tokens.

    A decoder continues ``input_ids``; an encoder-decoder reads them and answers in rows that begin with the one id
    ``start``. attention_mask (B, T): 1 for kept tokens; padding may stand on either side. Rows end with ``eos`` and are
    filled up with it. Each token is the likeliest one, unless ``temperature``, ``top_k`` or ``top_p`` asks to sample:
    row i then draws from ``seed`` + i. Never chosen are the ids in ``forbidden``, nor those beyond ``model.tokenizer``
    where there is one. Raises UserError for what cannot be.
    """
    check_sampling(temperature, top_k, top_p, model.vocab_size)
    check_rows(model, input_ids, attention_mask, max_new_tokens, start)
    device = next(model.parameters()).device
    rows, mask = input_ids.to(device), None if attention_mask is None else attention_mask.to(device)
    sampled = any(choice is not None for choice in (temperature, top_k, top_p))
    draws = [torch.Generator().manual_seed(seed + i) for i in range(len(rows))] if sampled else None
    known = len(model.tokenizer) if hasattr(model, "tokenizer") else model.vocab_size
    never = torch.tensor([*forbidden, *range(known, model.vocab_size)], dtype=torch.long, device=device)
    with evaluating(model):
        read, rows, mask = reader(model, rows, mask, max_new_tokens, start)
        new, ended = rows, torch.zeros(len(rows), dtype=torch.bool, device=device)
        for _ in range(max_new_tokens):
            logits = read(new, mask).float().index_fill(1, never, -torch.inf)
            token = choose(logits, temperature, top_k, top_p, draws)
            if eos is not None:
                token = torch.where(ended, eos, token)
                ended |= token == eos
            new, mask = token[:, None], None
            rows = torch.cat([rows, new], 1)
            if ended.all():
                break
    return rows


def reader(model: nn.Module, rows: Tensor, mask: Tensor | None, n_new: int, start: int | None):
    """(read, the decoder's first rows, their mask); read(new (B, t), mask) -> logits (B, V) of what comes next."""
    if model.family == "decoder":
        cache = model.cache(len(rows), rows.shape[1] + n_new)
        return lambda new, kept: model(new, kept, cache=cache, readout=last(kept)), rows, mask
    memory, cache = model.encode(rows, mask), model.cache(len(rows), 1 + n_new)
    first = rows.new_full((len(rows), 1), start)
    return lambda new, kept: model.decode(new, memory, mask, kept, cache=cache, readout=last(kept)), first, None


def last(mask: Tensor | None):
    """The readout of logits (B, V) at each row's last kept position."""

    def readout(head, hidden: Tensor) -> Tensor:
        if mask is None:
            return head(hidden[:, -1])
        columns = torch.arange(mask.shape[1], device=mask.device)
        return head(hidden[torch.arange(len(mask), device=mask.device), (mask * columns).argmax(1)])

    return readout


def choose(
    logits: Tensor, temperature: float | None, top_k: int | None, top_p: float | None, draws: list | None
) -> Tensor:
    """logits (B, V) -> ids (B,): the likeliest, or drawn by ``draws``, a generator per row."""
    if draws is None:
        return logits.argmax(-1)
    logits = logits / (temperature or 1.0)
    if top_k is not None:
        best = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(1, best.indices, best.values)
    if top_p is not None:
        ordered = logits.softmax(-1).sort(descending=True)
        enough = ordered.values.cumsum(-1) - ordered.values >= top_p  # those before it hold top_p already
        logits = logits.masked_fill(enough.scatter(1, ordered.indices, enough), -torch.inf)
    rows = zip(logits.softmax(-1).cpu(), draws, strict=True)
    return torch.cat([row.multinomial(1, generator=draw) for row, draw in rows]).to(logits.device)


def check_sampling(temperature: float | None, top_k: int | None, top_p: float | None, vocab_size: int) -> None:
    """Refuse what no distribution can be made of."""
    if temperature is not None and not temperature > 0:
        raise UserError(f"temperature={temperature} must be above 0; leave it out for the likeliest token each time")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise UserError(f"top_k={top_k} must be between 1 and the vocabulary's size, {vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")


def check_rows(model: nn.Module, rows: Tensor, mask: Tensor | None, max_new_tokens: int, start: int | None) -> None:
    """Refuse a model that cannot generate, and rows that it cannot continue."""
    length, answers = rows.shape[-1], check_family(model, "decoder", "encoder-decoder") == "encoder-decoder"
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if rows.ndim != 2 or 0 in rows.shape:
        raise UserError(f"input_ids must be rows (B, T) of at least one token, not of shape {tuple(rows.shape)}")
    if mask is not None and (mask.shape != rows.shape or not mask.bool().any(1).all()):
        raise UserError("the attention_mask must have the shape of input_ids and keep a token of every row")
    if not 0 <= rows.min() <= rows.max() < model.vocab_size:
        raise UserError(f"input_ids must lie between 0 and {model.vocab_size - 1}: is the tokenizer another model's?")
    if answers and start is None:
        raise UserError("an encoder-decoder needs start, the id that its answers begin with (the tokenizer's start)")
    needed = max(length, 1 + max_new_tokens) if answers else length + max_new_tokens
    if model.max_positions is not None and needed > model.max_positions:
        raise UserError(f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} need {needed} positions, but "
                        f"the model has {model.max_positions}: make one of them shorter")  # fmt: skip


def check_family(model: nn.Module, *families: str) -> str:
    """The model's family, if it is among ``families`` and its head speaks tokens."""
    if model.family not in families:
        can = {"encoder": "fills masks, it cannot generate", "decoder": "continues a prompt",
               "encoder-decoder": "generates an answer or fills spans"}  # fmt: skip
        raise UserError(f"the model is of the family {model.family}, which {can[model.family]}")
    if isinstance(model.head, Pooler):
        raise UserError(f"the model's head, {type(model.head).__name__}, answers a row as a whole and chooses no token")
    return model.family


@contextmanager
def evaluating(model: nn.Module):
    """The model without dropout; afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
