"""Seeing attention: which token looks at which in a text, in every layer and head.

python -m lmzoo.tools.attention RUN --text "..." [--answer "..."] [--html FILE] [--png FILE]

The page is one file that loads nothing: a small heat map for each layer and head; a click enlarges
it, and a token under the pointer shows its weights. An encoder-decoder has the attention of its
encoder, of its decoder, and from one to the other; its decoder reads --answer, or what it says.
A {} in a text is a blank to a net that fills blanks. Layers and heads are counted from 0.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
from lmzoo.tools import answer, new_file, parser, trusting
from torch import Tensor, nn

from lmzoo import UserError, load
from lmzoo.blocks.attention import Attention
from lmzoo.blocks.head import Pooler
from lmzoo.decoding import evaluating
from lmzoo.decoding.answering import spelled
from lmzoo.decoding.filling import BLANK, join
from lmzoo.tokenizer import Tokenizer

LONGEST = 128  # tokens of a row: of more nobody could read the weights
GENERATED = 32  # tokens of an answer that is not given, at most
BLANKS = str.maketrans(" \n\t", "␣↵⇥")
TEXT, ANSWER = "input_ids", "decoder_input_ids"
COLOURS = ["#f6f8fc", "#b9cdf0", "#5f86d3", "#2d3f9e", "#170b4a"]  # of the square root of a weight, from 0 to 1


@dataclass
class View:
    """One kind of attention: its weights (layers, heads, T, S) from T tokens, `queries`, to S tokens, `keys`."""

    name: str
    queries: list[str]
    keys: list[str]
    weights: Tensor


def see(run: str, text: str, reply: str | None, html: Path | None, png: Path | None, trust: tuple = ()) -> str:
    """Write the page, the picture, or both; what was written. `reply`: what a decoder reads that answers the text."""
    if not html and not png:
        html, png = Path("attention.html"), Path("attention.png")
    for file, suffix in ((html, ".html"), (png, ".png")):
        if file:
            new_file(file, suffix)
    if not text.strip():
        raise UserError('no text to read: say --text "..."')
    net = load(run, trust, reads_text=True)
    found = views(net, text, reply)
    if html:
        html.write_text(page(run, found), encoding="utf-8")
    if png:
        draw(found, png)
    sizes = ", ".join("{}: {} layers x {} heads".format(view.name, *view.weights.shape) for view in found)
    return f"{' and '.join(str(file) for file in (html, png) if file)}: {sizes}"


def views(net: nn.Module, text: str, reply: str | None = None) -> list[View]:
    """Every attention of `net` while it reads a text."""
    rows = read(net, text, reply)
    kinds = attentions(net)
    with evaluating(net), ExitStack() as stack:
        heard = [stack.enter_context(recording(parts)) for *_, parts in kinds]
        net(**{side: torch.tensor([ids]) for side, ids in rows.items()}, readout=lambda head, hidden: hidden)
    tokens = {side: [shown(net.tokenizer, id) for id in ids] for side, ids in rows.items()}
    found = []
    for (name, queries, keys, _), layers in zip(kinds, heard, strict=True):
        for layer, weights in enumerate(layers):
            if not weights.isfinite().all():
                raise UserError(f"{name}: layer {layer} has weights that are not finite: take an earlier checkpoint")
        found.append(View(name, tokens[queries], tokens[keys], torch.stack(layers).float()))
    return found


def attentions(net: nn.Module) -> list[tuple[str, str, str, list[Attention]]]:
    """(name, whose tokens look, at whose, the parts that do it) of each kind of attention."""
    if net.family != "encoder-decoder":
        return [(f"{net.family} on itself", TEXT, TEXT, [block.attn for block in net.blocks])]
    return [
        ("encoder on itself", TEXT, TEXT, [block.attn for block in net.encoder.blocks]),
        ("decoder on itself", ANSWER, ANSWER, [block.attn for block in net.decoder.blocks]),
        ("decoder on encoder", ANSWER, TEXT, [block.cross for block in net.decoder.blocks]),
    ]


@contextmanager
def recording(parts: Sequence[Attention]) -> Iterator[list[Tensor]]:
    """The weights (H, T, S) of one row, call by call of `parts`, which are afterwards as they were."""
    heard: list[Tensor] = []
    backends = [part.backend for part in parts]
    for part in parts:
        part.backend, part.attend = "matmul", partial(attend, part.attend, heard)
    try:
        yield heard
    finally:
        for part, backend in zip(parts, backends, strict=True):
            part.backend = backend
            del part.attend


def attend(whole, heard: list[Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """`whole(q, k, v, mask, is_causal)`; its weights, which are what it makes of the identity matrix, go to `heard`."""
    one = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
    heard.append(whole(q, k, one, mask, is_causal)[0])
    return whole(q, k, v, mask, is_causal)


def read(net: nn.Module, text: str, reply: str | None) -> dict[str, list[int]]:
    """The ids that each stack reads, in rows like those of training; UserError for one that is too long."""
    tokenizer, speaks, answers = net.tokenizer, not isinstance(net.head, Pooler), net.family == "encoder-decoder"
    if reply is not None and not (answers and speaks):
        raise UserError("--answer is for a net whose decoder answers a text; this one reads the text alone")
    whole = tokenizer.document(encode(net, text))
    if speaks and net.family == "decoder" and tokenizer.eos is not None:
        whole = whole[:-1]  # the text may go on
    if speaks and answers and tokenizer.bos is not None:
        whole = whole[1:]
    rows = {TEXT: whole}
    check_length(net, "text", whole)
    if answers and not speaks:
        rows[ANSWER] = whole  # which the decoder reads as well
    elif answers:
        tokenizer.require("start", "eos", task="answering")
        said = encode(net, reply) if reply is not None else answered(net, whole)
        rows[ANSWER] = [tokenizer.start, *said]
        check_length(net, "answer", rows[ANSWER])
    return rows


def encode(net: nn.Module, text: str) -> list[int]:
    """The ids of a text; a net that fills blanks reads them as its mask, or as sentinels."""
    tokenizer = net.tokenizer
    if net.family == "decoder" or isinstance(net.head, Pooler) or BLANK not in (blanked := spelled(tokenizer, text)):
        return tokenizer.encode(text)
    tokenizer.require("mask" if net.family == "encoder" else "sentinels", task="filling blanks")
    masks = [tokenizer.mask] * blanked.count(BLANK)
    return join(tokenizer, blanked, masks if net.family == "encoder" else tokenizer.sentinels)


def answered(net: nn.Module, ids: list[int]) -> list[int]:
    """The likeliest answer, each token the likeliest, without its eos."""
    tokenizer = net.tokenizer
    room = min(GENERATED, longest(net) - 1)
    said = net.generate(torch.tensor([ids]), max_new_tokens=room, start=tokenizer.start, eos=tokenizer.eos)[0, 1:]
    return [id for id in said.tolist() if id != tokenizer.eos]


def longest(net: nn.Module) -> int:
    return min(LONGEST, net.max_positions or LONGEST)


def check_length(net: nn.Module, name: str, ids: list[int]) -> None:
    if not 1 <= len(ids) <= longest(net):
        reason = "of which nobody could read more on a page" if longest(net) == LONGEST else "the positions of the net"
        raise UserError(f"the {name} has {len(ids)} tokens: give one of 1 to {longest(net)}, {reason}")


def shown(tokenizer: Tokenizer, id: int) -> str:
    """A token as one reads it; as the vocabulary spells it where it is no whole character, or nothing."""
    text = tokenizer.decode([id], skip_special=False)
    return tokenizer.token(id) if not text or "\ufffd" in text else text.strip() or text.translate(BLANKS)


def page(run: str, found: list[View]) -> str:
    """The page, with the weights to four decimals."""
    data = {"run": run, "colours": COLOURS, "views": [
        vars(view) | {"weights": view.weights.double().round(decimals=4).tolist()} for view in found
    ]}  # fmt: skip
    template = files("lmzoo.tools").joinpath("attention.html").read_text(encoding="utf-8")
    return template.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"), 1)


def draw(found: list[View], file: Path) -> None:
    """All heat maps, layers from top to bottom and heads from left to right."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    colours = LinearSegmentedColormap.from_list("weights", COLOURS).with_extremes(bad="white")
    heights = [len(view.weights) for view in found]
    size = (2 + 1.2 * found[0].weights.shape[1], 0.6 * len(found) + 1.2 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    every = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
    for axes, view in zip(every, found, strict=True):
        n_layers, n_heads, height, width = view.weights.shape
        below, beside = max(1, height // 12), max(1, width // 12)  # nothing, between two maps
        apart = nn.functional.pad(view.weights, (0, beside, 0, below), value=torch.nan)
        tiles = apart.transpose(1, 2).flatten(2).flatten(0, 1)[:-below, :-beside].numpy()
        image = axes.imshow(tiles, colours, PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
        for tick, name, n, size, gap in ((axes.set_yticks, "layer", n_layers, height, below),
                                         (axes.set_xticks, "head", n_heads, width, beside)):  # fmt: skip
            tick([i * (size + gap) + (size - 1) / 2 for i in range(n)], [f"{name} {i}" for i in range(n)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(view.name)
    figure.colorbar(image, ax=every, label="weight", ticks=[0, 0.05, 0.2, 0.5, 1])
    figure.savefig(file, dpi=150)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("run", type=lambda word: word.removeprefix("ckpt="),
                           help="a run's folder, a checkpoint file, or a folder that transformers reads")  # fmt: skip
    arguments.add_argument("--text", default="", help="what the net reads")
    arguments.add_argument("--answer", help="what the decoder of an encoder-decoder reads (default: what it generates)")
    arguments.add_argument("--html", type=Path, metavar="FILE", help="the page, a new file (default: attention.html)")
    arguments.add_argument("--png", type=Path, metavar="FILE", help="a picture of all layers and heads, a new file "
                           "(default: attention.png; if one of the two is named, that alone is written)")  # fmt: skip
    trusting(arguments)
    given = arguments.parse_args()
    answer(see, given.run, given.text, given.answer, given.html, given.png, tuple(given.trust))


if __name__ == "__main__":
    main()
