"""Fill what is missing in a text: masks by an encoder, spans by an encoder-decoder.

A blank is written ``{}``, or as the mask token or a sentinel is spelled. The special tokens of a text are text to the
tokenizer, so the pieces between blanks are encoded one by one and the ids put between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import UserError
from ..tokenizer import WORD
from . import check_family, check_length, evaluating, generate

BLANK = "{}"


def fill_masks(model: nn.Module, tokenizer, text: str, top: int = 3) -> list[list[tuple[str, float]]]:
    """For each blank of ``text`` ({}, or the mask token as it is written) its ``top`` tokens with their probabilities.

    Raises UserError for a model that is no encoder, a tokenizer without mask, a text without blank or too long.
    """
    row = torch.tensor([masked_ids(model, tokenizer, text, top)], device=next(model.parameters()).device)
    with evaluating(model):
        logits = model(row, readout=lambda head, hidden: head(hidden[row == tokenizer.mask]))
    best = logits[:, : len(tokenizer)].float().softmax(-1).topk(top)
    tokens = [[tokenizer.decode([id]).strip() or tokenizer.token(id) for id in line] for line in best.indices.tolist()]
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, best.values.tolist(), strict=True)]


def masked_ids(model: nn.Module, tokenizer, text: str, top: int) -> list[int]:
    """What an encoder reads of a text with blanks; UserError as in `fill_masks`."""
    check_family(model, "encoder")
    tokenizer.require("mask", task="filling masks")
    if not 1 <= top <= len(tokenizer):
        raise UserError(f"{top} tokens for a blank: there must be 1 to {len(tokenizer)}, the size of the vocabulary")
    text = text.replace(tokenizer.token(tokenizer.mask), BLANK)
    ids = tokenizer.document(join(tokenizer, text, [tokenizer.mask] * text.count(BLANK)))
    if model.max_positions is not None and len(ids) > model.max_positions:
        raise UserError(f"a text of {len(ids)} tokens is longer than the {model.max_positions} positions of the model")
    return ids


def fill_spans(model: nn.Module, tokenizer, text: str, max_new_tokens: int = 64) -> dict[str, str]:
    """For each blank of ``text`` ({}, or a sentinel as it is written): {sentinel: span}, each token the likeliest.

    The span of a sentinel that the model left out is empty. Raises UserError for a model that is no encoder-decoder, a
    tokenizer without sentinels, a text without blank, too long, or with more blanks than sentinels.
    """
    row = spanned_ids(model, tokenizer, text, max_new_tokens)
    words = {"eos": tokenizer.eos, "start": tokenizer.start, "forbidden": range(len(tokenizer), model.vocab_size)}
    answer, spans = generate(model, torch.tensor([row]), None, max_new_tokens, **words)[0, 1:].tolist(), {}
    for sentinel in tokenizer.sentinels[: sum(id in tokenizer.sentinels for id in row)]:
        behind = answer[answer.index(sentinel) + 1 :] if sentinel in answer else []
        end = next((at for at, id in enumerate(behind) if id in tokenizer.special_ids), len(behind))
        spans[tokenizer.token(sentinel)] = tokenizer.decode(behind[:end]).strip()
    return spans


def spanned_ids(model: nn.Module, tokenizer, text: str, max_new_tokens: int) -> list[int]:
    """What an encoder-decoder reads of a text with blanks; UserError as in `fill_spans`."""
    check_family(model, "encoder-decoder")
    tokenizer.require("sentinels", "start", "eos", task="filling spans")
    for sentinel in tokenizer.sentinels:
        text = text.replace(tokenizer.token(sentinel), BLANK)
    ids = [*join(tokenizer, text, tokenizer.sentinels), tokenizer.eos]
    check_length(model, len(ids), max_new_tokens)
    return ids


def blanked(text: str, n_words: int = 1) -> tuple[str, list[str]]:
    """``text`` with two of its parts, each of ``n_words`` words, as blanks; and what stood there.

    They begin with the first letters after a quarter and after two thirds of the words.
    """
    words = list(WORD.finditer(text))
    lettered = [i for i, word in enumerate(words[: len(words) - n_words]) if word[0].strip().isalpha()]
    parts, taken, begin = [], [], 0
    for least in (len(words) // 4, 2 * len(words) // 3):
        at = next((i for i in lettered if i >= least), None)
        if at is None or words[at].start() < begin:
            continue
        cut = words[at].end() - len(words[at][0].lstrip())
        end = words[at + n_words - 1].end()
        parts.append(text[begin:cut])
        taken.append(text[cut:end])
        begin = end
    return BLANK.join([*parts, text[begin:]]), taken


def join(tokenizer, text: str, fillers: Sequence[int]) -> list[int]:
    """Ids of ``text`` with one of ``fillers`` in place of each blank."""
    first, *others = text.split(BLANK)
    if not others:
        raise UserError(f"the text has no blank: put {BLANK} where a part is missing")
    if len(others) > len(fillers):
        raise UserError(f"the text has {len(others)} blanks, and the tokenizer has sentinels for {len(fillers)}: leave "
                        "some out")
    ids = tokenizer.encode(first.rstrip())
    for filler, part in zip(fillers, others, strict=False):
        ids = [*ids, filler, *tokenizer.encode(part.rstrip())]
    return ids
