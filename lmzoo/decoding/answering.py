"""What a net makes of a prompt, as records: a decoder continues it, an encoder fills its blanks, an encoder-decoder
fills them or, where there are none, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from ..choices import SAMPLING, check_choices
from ..errors import UserError
from ..tokenizer import Tokenizer
from . import check_length, generate, search
from .filling import BLANK, fill_masks, fill_spans, masked_ids, spanned_ids
from .telling import Teller


def has_blanks(net: nn.Module, prompt: str) -> bool:
    """Whether a prompt is to be filled; an encoder can do nothing else."""
    return net.family == "encoder" or net.family == "encoder-decoder" and BLANK in spelled(net.tokenizer, prompt)


def spelled(tokenizer: Tokenizer, prompt: str) -> str:
    """A prompt whose masks and sentinels are blanks as well."""
    for id in (tokenizer.mask, *tokenizer.sentinels):
        prompt = prompt if id is None else prompt.replace(tokenizer.token(id), BLANK)
    return prompt


def fill(net: nn.Module, prompt: str, *, max_new_tokens: int = 64, n_best: int | None = None, **words) -> list[dict]:
    """[{prompt, blanks: for each the n_best (3) tokens [token, probability]}] of an encoder, else [{prompt, spans:
    {sentinel: text}}]. ``words``: those of `answer`, which are refused unless they leave a blank to what is likeliest.
    """
    check_blanks(net, prompt, max_new_tokens, n_best, words)
    if net.family == "encoder":
        return [{"prompt": prompt, "blanks": fill_masks(net, net.tokenizer, prompt, n_best or 3)}]
    return [{"prompt": prompt, "spans": fill_spans(net, net.tokenizer, prompt, max_new_tokens)}]


def filled(tokenizer: Tokenizer, record: dict) -> str:
    """The prompt of a record of `fill`, what is likeliest in brackets in the place of each blank."""
    fillers = [blank[0][0] for blank in record.get("blanks", ())] or record["spans"].values()
    first, *others = spelled(tokenizer, record["prompt"]).split(BLANK)
    return first + "".join(f"[{filler}]{part}" for filler, part in zip(fillers, others, strict=True))


def check(net: nn.Module, prompt: str, *, max_new_tokens: int = 64, n_best: int | None = None, **words) -> None:
    """Raise UserError, as `fill` or `answer` would, for a prompt that the net cannot read with these words."""
    if has_blanks(net, prompt):
        check_blanks(net, prompt, max_new_tokens, n_best, words)
    else:
        check_length(net, len(prompt_ids(net, prompt)), max_new_tokens)


def check_blanks(net: nn.Module, prompt: str, max_new_tokens: int, n_best: int | None, words: Mapping) -> None:
    """Refuse words that filling has no use for, and a prompt that the net would not see as it is."""
    asked = [word for word in (*SAMPLING, "repetition_penalty", "stop") if words.get(word)]
    asked += ["n_beams"] * (words.get("n_beams", 1) > 1) + ["n_best"] * bool(net.family != "encoder" and n_best)
    if asked:
        raise UserError(f"{asked[0]}: an {net.family} fills blanks with what is likeliest, and has no use for it")
    check_known(net.tokenizer, *spelled(net.tokenizer, prompt).split(BLANK))
    if net.family == "encoder":
        masked_ids(net, net.tokenizer, prompt, n_best or 3)
    else:
        spanned_ids(net, net.tokenizer, prompt, max_new_tokens)


def answer(
    net: nn.Module,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    n_beams: int = 1,
    n_best: int | None = None,
    length_penalty: float = 1.0,
    repetition_penalty: float | None = None,
    stop: Sequence[str] = (),
    stream: Callable[[int, str], object] | None = None,
    **sampling,
) -> list[list[dict]]:
    """For each prompt [{prompt, answer}]; with beams its ``n_best`` (1) answers, each with its log_probability.

    ``sampling``: temperature, top_k, top_p, min_p and seed. ``stream``: called with (number of the prompt, piece of its
    answer). An answer ends before a stop string. Raises UserError for what net, tokenizer or words do not allow.
    """
    tokenizer, continues = net.tokenizer, net.family == "decoder"
    rows, mask = left_padded([prompt_ids(net, prompt) for prompt in prompts])
    eos = tokenizer.chat.eos if chats(net) else tokenizer.eos
    limits = {"max_new_tokens": max_new_tokens, "eos": eos, "start": None if continues else tokenizer.start}
    if n_beams > 1 or n_best is not None:
        check_choices(**{word: sampling.get(word) for word in SAMPLING}, n_beams=n_beams, n_best=n_best)
        found, totals = search(net, rows, mask, **limits, n_beams=n_beams, n_best=n_best or 1,
                               length_penalty=length_penalty, repetition_penalty=repetition_penalty)  # fmt: skip
        new = found[:, :, rows.shape[1] if continues else 1 :].tolist()
        prompt_rows = [row[kept].tolist() if continues else [] for row, kept in zip(rows, mask.bool(), strict=True)]
        return [
            [{"prompt": prompt, "answer": told(tokenizer, before, ids, stop, eos), "log_probability": total}
             for ids, total in zip(*best, strict=True)]
            for prompt, before, *best in zip(prompts, prompt_rows, new, totals.tolist(), strict=True)
        ]  # fmt: skip
    texts = [""] * len(prompts)

    def hear(i: int, piece: str) -> None:
        texts[i] += piece
        if stream:
            stream(i, piece)

    generate(net, rows, mask, **limits, **sampling, repetition_penalty=repetition_penalty, stop=stop, stream=hear)
    return [[{"prompt": prompt, "answer": text}] for prompt, text in zip(prompts, texts, strict=True)]


def prompt_ids(net: nn.Module, prompt: str) -> list[int]:
    """What the net reads of a prompt: a decoder after bos, or as its chat template renders what a user says; an
    encoder-decoder up to eos."""
    tokenizer = net.tokenizer
    check_known(tokenizer, prompt)
    if chats(net):
        try:
            return tokenizer.chat.prompt(prompt)
        except ValueError as error:
            raise UserError(f"prompt={prompt}: {error} (chat=false leaves the template out)") from error
    ids = tokenizer.encode(prompt)
    if net.family != "decoder":
        tokenizer.require("start", "eos", task="answering")
        return [*ids, tokenizer.eos]
    if not ids and tokenizer.bos is None:
        raise UserError("the prompt is empty, and the tokenizer has no bos to begin with")
    return ids if tokenizer.bos is None else [tokenizer.bos, *ids]


def check_known(tokenizer: Tokenizer, *texts: str) -> None:
    """Refuse text that the net would not see as it is, naming the characters, or the words, without a token."""

    def unknown(parts: Iterable[str]) -> list[str]:
        return [part for part in dict.fromkeys(parts) if tokenizer.unk in tokenizer.encode(part)]

    if tokenizer.unk is not None and unknown(texts):
        parts = unknown("".join(texts)) or unknown(" ".join(texts).split()) or unknown(texts)
        raise UserError(f"the tokenizer has no token for {', '.join(map(repr, parts))} of the prompt")


def left_padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids (B, T), mask (B, T)) of rows of unequal length."""
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])


def chats(net: nn.Module) -> bool:
    """Whether a prompt is what a user says to an assistant, as the tokenizer of a decoder knows by its template."""
    return net.family == "decoder" and net.tokenizer.chat_template is not None


def told(tokenizer: Tokenizer, before: list[int], ids: list[int], stop: Sequence[str], eos: int | None) -> str:
    """The text of ``ids`` behind those ``before``, up to eos or a stop string."""
    pieces: list[str] = []
    teller = Teller(tokenizer, before, stop, pieces.append)
    for i, id in enumerate(ids):
        teller.take(id, id == eos or i + 1 == len(ids))
    return "".join(pieces)
