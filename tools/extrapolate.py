"""Rows longer than those of training: loss by position, for each scheme of positions.

python -m lmzoo.tools.extrapolate [--length 128] [--read 512] [--png FILE] [WORD ...]

Trains a decoder in rows of --length for each scheme, then reads held-out text in rows of --read:
its nats per token at each position. A rotary net is also read with turns scaled to longer rows.
Learned positions end where training did, and are read as far as they go. WORDs are of training
(python -m lmzoo.train --help); without any it is the default run, about two minutes for a scheme on
two cores.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from lmzoo.tools import answer, check_own, new_file, parser
from torch import Tensor, nn

import lmzoo
from lmzoo import UserError, parts
from lmzoo.literal import plain
from lmzoo.train import assemble

SCHEMES = ["learned", "sinusoidal", "rotary", "alibi", "t5"]
SCALINGS = ["rotary_linear", "rotary_ntk", "rotary_yarn", "rotary_llama3"]


def extrapolate(words: list[str], schemes: list[str], length: int, read: int, png: Path | None) -> str:
    """The table: nats per token in each stretch of positions; `png`: the picture to draw."""
    if read <= length:
        raise UserError(f"--read {read} must be more than the rows of training, --length {length}")
    check_own(words, {"model/position": "give --schemes", "model.max_len": "give --length", "name": "leave it out"})
    if png:
        new_file(png, ".png")
    configs = {scheme: config(words, scheme, length) for scheme in schemes}
    store, found = assemble(parts.settled(next(iter(configs.values()))))[1].store, {}
    if "val" not in store.splits:
        raise UserError("there is no held-out text to read: say data.val_path or data.val_fraction")
    split = store["val"]
    if split.n_tokens <= read:
        raise UserError(f"the held-out text has {split.n_tokens} tokens, which is no row of {read}: give more text")
    for scheme, one in configs.items():
        net, _ = lmzoo.fit(one)
        for name, longer in readings(net, scheme, words, length, read):
            found[name] = by_position(longer, split, longer.max_positions or read)
    if png:
        picture(found, length, png)
    return table(found, length, read)


def config(words: list[str], scheme: str, length: int):
    """The run that trains a scheme."""
    return lmzoo.compose("model=llama", "task=clm", *words, f"model/position={scheme}", f"model.max_len={length}",
                         f"name=extrapolate-{scheme}")


def readings(net: nn.Module, scheme: str, words: list[str], length: int, read: int) -> Iterator[tuple[str, nn.Module]]:
    """(name, net) of the ways to read with what a scheme has learned."""
    yield scheme, net
    for name in SCALINGS if scheme == "rotary" else ():
        settings = plain(config(words, name, length).model) | {"vocab_size": net.vocab_size, "max_len": read}
        settings["position"]["scaling"] = read / length
        longer = lmzoo.build(settings)
        longer.load_state_dict(net.state_dict())
        yield name, longer.eval()


@torch.no_grad()
def by_position(net: nn.Module, split, length: int) -> Tensor:
    """Mean nats of the token after each of `length` positions, over rows that follow one another."""
    total, n_rows = torch.zeros(length, dtype=torch.float64), 0
    for begin in range(0, split.n_tokens - length, length):
        tokens = torch.from_numpy(split.read(begin, begin + length + 1))
        if len(tokens) <= length:  # the end of one of several sets
            continue
        n_rows += 1
        logits = net(tokens[None, :-1])[0].float()
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").double()
    return total / n_rows


def table(found: dict[str, Tensor], length: int, read: int) -> str:
    """Nats per token in the rows' stretches, the first of them as long as training's rows."""
    edges = range(0, read, length)
    heads = [f"{edge} - {min(edge + length, read) - 1}" for edge in edges]
    lines = [f"{'nats per token at':<20}" + "".join(f"{head:>14}" for head in heads)]
    for name, nats in found.items():
        parts = [nats[edge : edge + length] for edge in edges]
        lines.append(f"{name:<20}" + "".join(f"{part.mean():>14.3f}" if len(part) else f"{'-':>14}" for part in parts))
    return "\n".join(lines)


def picture(found: dict[str, Tensor], length: int, file: Path) -> None:
    """A line for each way to read: means over stretches of sixteen positions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, nats in found.items():
        stretches = nats.split(16)
        axes.plot([16 * i + 8 for i in range(len(stretches))], [part.mean() for part in stretches], label=name)
    axes.axvline(length, color="gray", linestyle=":", label="rows of training end")
    axes.set(xlabel="position in the row, tokens", ylabel="loss, nats per token")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="*", metavar="WORD", help="of training, as optim.lr=1e-3")
    arguments.add_argument("--schemes", type=lambda text: text.split(","), default=SCHEMES, metavar="alibi,...",
                           help="of model/position")
    arguments.add_argument("--length", type=int, default=128, help="rows of training, tokens")
    arguments.add_argument("--read", type=int, default=512, help="rows that are read afterwards, tokens")
    arguments.add_argument("--png", type=Path, metavar="FILE", help="draw the loss along the row")
    given = arguments.parse_args()
    answer(extrapolate, given.words, given.schemes, given.length, given.read, given.png)


if __name__ == "__main__":
    main()
