"""Continue rows of tokens, one token at a time.

Each step reads only what is new, since the model's cache holds the keys and values of all earlier tokens. Rows of
unequal length are padded, and each row gives what it gives alone. How a token is drawn stands in sampling.py, beam
search in beams.py, text and stop strings in telling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn

from ..blocks.head import Pooler
from ..blocks.project import joined
from ..choices import check_choices
from ..errors import UserError
from ..models.encoder import check_ids
from .beams import Beams
from .sampling import distribution, draw, penalise, uniforms
from .telling import Teller


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
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    n_beams: int = 1,
    length_penalty: float = 1.0,
    seed: int = 0,
    forbidden: Iterable[int] = (),
    stop: Sequence[str] = (),
    stream: Callable[[int, str], object] | None = None,
) -> Tensor:
    """input_ids (B, T) -> the decoder's rows (B, T + n), n <= max_new_tokens.

    A decoder continues ``input_ids``; an encoder-decoder reads them and answers in rows that begin with the one id
    ``start``. attention_mask (B, T): 1 for kept tokens; padding may stand anywhere. Rows end with ``eos``, or as soon
    as their new text holds one of ``stop``, and are filled up with eos. Each token is the likeliest one, unless
    ``temperature``, ``top_k``, ``top_p`` or ``min_p`` asks to sample: row i then draws from ``seed`` + i. With
    ``n_beams`` > 1 a row is the best of `search`. Never chosen are the ids in ``forbidden``, nor those beyond
    ``model.tokenizer`` where there is one. ``stream`` is called with (row, piece of text) as the text of
    ``model.tokenizer`` comes, without the stop string. Raises UserError for what cannot be.
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    check_choices(**sampling, repetition_penalty=repetition_penalty, n_beams=n_beams, vocab_size=model.vocab_size)
    if n_beams > 1:
        if stop or stream:
            raise UserError("stop and stream follow one row as it comes, beams are many: leave out n_beams, or both")
        return search(model, input_ids, attention_mask, max_new_tokens, eos=eos, start=start, n_beams=n_beams,
                      length_penalty=length_penalty, repetition_penalty=repetition_penalty,
                      forbidden=forbidden)[0][:, 0]  # fmt: skip
    reader = Reader(model, input_ids, attention_mask, max_new_tokens, start, forbidden)
    tellers = follow(model, reader, eos, stop, stream)
    (batch, length), device = reader.first.shape, reader.first.device
    rows = torch.cat([reader.first, reader.first.new_zeros(batch, max_new_tokens)], 1)
    sampled = any(choice is not None for choice in sampling.values())
    u = uniforms(seed, batch, max_new_tokens, device) if sampled else None
    seen = reader.seen() if repetition_penalty is not None else None
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    with evaluating(model):
        for n in range(max_new_tokens):
            scores = reader.read(rows[:, length + n - 1 : length + n]) if n else reader.begin()
            if seen is not None:
                scores = penalise(scores, seen, repetition_penalty)
            token = draw(*distribution(scores, **sampling), u[:, n]) if sampled else scores.argmax(-1)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            if eos is not None:
                token.masked_fill_(ended, eos)
                ended |= token == eos
            rows[:, length + n] = token
            for i, teller in enumerate(tellers):
                ends = n + 1 == max_new_tokens or ended[i].item()
                ended[i] = teller.take(token[i].item(), ends)
            if (eos is not None or tellers) and ended.all():
                break
    return rows[:, : length + n + 1]


def search(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 64,
    *,
    eos: int | None = None,
    start: int | None = None,
    n_beams: int = 4,
    n_best: int = 1,
    length_penalty: float = 1.0,
    repetition_penalty: float | None = None,
    forbidden: Iterable[int] = (),
) -> tuple[Tensor, Tensor]:
    """Beam search: input_ids (B, T) -> (rows (B, n_best, T + n), the log-probabilities (B, n_best) of what is new).

    The best stand first, ranked by log-probability / length^length_penalty (the eos counts); above 0 favours long rows.
    All else is as in `generate`. A repetition penalty acts on log-probabilities, which then are none any more.
    """
    check_choices(n_beams=n_beams, n_best=n_best, repetition_penalty=repetition_penalty, vocab_size=model.vocab_size)
    reader = Reader(model, input_ids, attention_mask, max_new_tokens, start, forbidden, n_beams)
    beams = Beams(len(input_ids), n_beams, max_new_tokens, length_penalty, eos, reader.first.device)
    seen = reader.seen().repeat_interleave(n_beams, 0) if repetition_penalty is not None else None
    with evaluating(model):
        scores = reader.begin().repeat_interleave(n_beams, 0)
        while True:
            scores = scores.log_softmax(-1)
            if seen is not None:
                scores = penalise(scores, seen, repetition_penalty)
            token, rows = beams.advance(scores)
            if beams.done():
                break
            if seen is not None:
                seen = seen[rows].scatter_(1, token[:, None], True)
            reader.cache.reorder(rows)
            scores = reader.read(token[:, None])
    best, log_probabilities = beams.best(n_best)
    return torch.cat([reader.first[:, None].expand(-1, n_best, -1), best], 2), log_probabilities.clone()


class Reader:
    """A model amid its rows: logits (B, V) of what comes next, first by ``begin``, then by ``read``.

    ``first``: the ids (B, t) that the decoder's rows begin with. With ``n_beams`` each row becomes so many after that.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Tensor,
        mask: Tensor | None,
        max_new_tokens: int,
        start: int | None,
        forbidden: Iterable[int],
        n_beams: int = 1,
    ):
        check_rows(model, rows, mask, max_new_tokens, start)
        device = next(model.parameters()).device
        known = len(model.tokenizer) if hasattr(model, "tokenizer") else model.vocab_size
        self.never = torch.tensor([*forbidden, *range(known, model.vocab_size)], dtype=torch.long, device=device)
        self.model, self.n_beams, self.memory = model, n_beams, None
        self.rows, self.mask = rows.to(device), None if mask is None or mask.all() else mask.to(device).bool()
        self.continues = model.family == "decoder"
        self.first = self.rows if self.continues else self.rows.new_full((len(rows), 1), start)
        if self.continues and self.mask is not None:  # padding goes to the left, where it is in nobody's way
            order = self.mask.long().sort(dim=1, stable=True).indices
            self.rows, self.mask = self.rows.gather(1, order), self.mask.gather(1, order)
        self.cache = model.cache(len(rows) * n_beams, self.first.shape[1] + max_new_tokens)

    def begin(self) -> Tensor:
        """Read the prompts."""
        if self.continues:
            logits = self._logits(self.model(self.rows, self.mask, cache=self.cache, readout=last))
        else:
            self.memory = self.model.encode(self.rows, self.mask)
            logits = self.read(self.first)
        if self.n_beams > 1:
            self.cache.spread(self.n_beams)
            self.memory = None if self.memory is None else self.memory.repeat_interleave(self.n_beams, 0)
            self.mask = None if self.mask is None else self.mask.repeat_interleave(self.n_beams, 0)
        return logits

    def read(self, new: Tensor) -> Tensor:
        """Read ``new`` (B, 1) ids."""
        if self.continues:
            return self._logits(self.model(new, cache=self.cache, readout=last))
        return self._logits(self.model.decode(new, self.memory, self.mask, cache=self.cache, readout=last))

    def _logits(self, logits: Tensor) -> Tensor:
        return logits.float().index_fill_(1, self.never, -torch.inf) if len(self.never) else logits.float()

    def seen(self) -> Tensor:
        """Which tokens (B, V) the decoder's rows hold at first."""
        kept = self.rows if self.continues else self.first
        if self.continues and self.mask is not None:
            kept = torch.where(self.mask, kept, kept[:, -1:])
        return kept.new_zeros(len(kept), self.model.vocab_size, dtype=torch.bool).scatter_(1, kept, True)


def last(head: nn.Module, hidden: Tensor) -> Tensor:
    """The readout of logits (B, V) at the last position."""
    return head(hidden[:, -1])


def follow(model: nn.Module, reader: Reader, eos: int | None, stop: Sequence[str], stream) -> list[Teller]:
    """A teller for each row, if somebody waits for a text."""
    stop = [stop] if isinstance(stop, str) else list(stop)
    if not stop and stream is None:
        return []
    if not hasattr(model, "tokenizer") or eos is None or "" in stop:
        raise UserError("stop and stream need texts that aren't empty, a model.tokenizer, and eos, by which rows that "
                        "have ended are filled up")  # fmt: skip
    prompts = reader.rows.tolist() if reader.continues else [[]] * len(reader.rows)
    keeps = reader.rows.new_ones(reader.rows.shape).tolist() if reader.mask is None else reader.mask.tolist()
    tell = stream or (lambda row, piece: None)
    return [Teller(model.tokenizer, compress(ids, keep), stop, partial(tell, i))
            for i, (ids, keep) in enumerate(zip(prompts, keeps, strict=True))]  # fmt: skip


def check_rows(model: nn.Module, rows: Tensor, mask: Tensor | None, max_new_tokens: int, start: int | None) -> None:
    """Refuse a model that cannot generate, and rows that it cannot continue."""
    answers = check_family(model, "decoder", "encoder-decoder") == "encoder-decoder"
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    check_ids(rows, mask)
    if 0 in rows.shape:
        raise UserError(f"input_ids must be rows (B, T) of at least one token, not of shape {tuple(rows.shape)}")
    if mask is not None and not mask.bool().any(1).all():
        raise UserError("the attention_mask must keep a token of every row of input_ids")
    if not 0 <= rows.min() <= rows.max() < model.vocab_size:
        raise UserError(f"input_ids must lie between 0 and {model.vocab_size - 1}: is the tokenizer another model's?")
    if answers and start is None:
        raise UserError("an encoder-decoder needs start, the id that its answers begin with (the tokenizer's start)")
    check_length(model, rows.shape[1], max_new_tokens)


def check_length(model: nn.Module, length: int, max_new_tokens: int) -> None:
    """Refuse a prompt of so many tokens if the positions of a model that generates do not reach to its answer's end."""
    if model.family == "encoder-decoder":  # it reads and writes in rows of their own
        rows = {f"a prompt of {length} tokens": length, f"max_new_tokens={max_new_tokens}": 1 + max_new_tokens}
    else:
        rows = {f"a prompt of {length} tokens and max_new_tokens={max_new_tokens}": length + max_new_tokens}
    for what, needed in rows.items():
        if model.max_positions is not None and needed > model.max_positions:
            raise UserError(f"{what}: this takes {needed} positions, but the model has {model.max_positions}: make it "
                            "shorter")


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
    """The model without dropout and gradients; afterwards as it was.

    Inference mode is quicker, but what FSDP keeps from one forward to the next must not be born in it. Compiled blocks
    run as they are written: each length would be compiled anew.
    """
    training, sharded = model.training, hasattr(model, "unshard")
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    model.eval()
    try:
        with (
            torch.no_grad() if sharded else torch.inference_mode(),
            torch.compiler.set_stance("force_eager") if compiled else nullcontext(),
            nullcontext() if sharded else joined(model),
        ):
            yield
    finally:
        model.train(training)
