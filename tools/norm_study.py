"""Where the norms stand: gradients by layer and loss, by depth, with and without warm-up.

python -m lmzoo.tools.norm_study [--depths 4,12,24] [--blocks pre,post] [--png FILE] [WORD ...]

With post-norm (Vaswani et al. 2017) the gradients of the last layers are large at the beginning,
and a deep net needs warm-up; with pre-norm they are not, and it does not (Xiong et al. 2020,
arXiv:2002.04745). For each block and depth: the gradient's norm in each layer on the first step's
rows, before any training; and the validation loss after training with the schedule's warm-up and
with none. WORDs are those of training (python -m lmzoo.train --help); without any it is the default
gpt with Glorot's initialisation, as in both papers, for 500 steps.
"""

from dataclasses import dataclass, field
from pathlib import Path

from lmzoo.tools import answer, check_own, new_file, parser
from torch import nn

import lmzoo
from lmzoo import UserError, engines, parts
from lmzoo.train import assemble

WARMUPS = ("warm-up", "none")
WORDS = ["model=gpt", "task=clm", "model/init=xavier", "trainer.max_steps=500", "trainer.val_every_n_steps=null"]


@dataclass
class Study:
    """Of one block at one depth: gradient norms from the first layer to the last, and losses by warm-up, in nats."""

    name: str
    norms: list[float]
    losses: dict[str, float] = field(default_factory=dict)


def study(words: list[str], depths: list[int], blocks: list[str], png: Path | None) -> str:
    """The table of all blocks and depths; `png`: the picture to draw."""
    check_own(words, {"model/block": "give --blocks", "model.n_layers": "give --depths", "name": "leave it out"})
    if png:
        new_file(png, ".png")
    typed = {word.partition("=")[0] for word in words}
    words = [*(word for word in WORDS if word.partition("=")[0] not in typed), *words]
    configs = {
        (block, depth): {
            warmup: lmzoo.compose(*spoken(words, warmup), f"model/block={block}", f"model.n_layers={depth}",
                                  f"name={block}-{depth}-{warmup}")
            for warmup in WARMUPS
        }
        for block in blocks for depth in depths
    }  # fmt: skip
    found = []
    for (block, depth), by_warmup in configs.items():
        found.append(Study(f"{block}, {depth} layers", gradient_norms(by_warmup["warm-up"])))
        for warmup, config in by_warmup.items():
            found[-1].losses[warmup] = lmzoo.fit(config)[1]["val/loss"]
    if png:
        picture(found, png)
    return table(found)


def spoken(words: list[str], warmup: str) -> list[str]:
    """The words of a run with the schedule's warm-up, or with none."""
    if warmup == "warm-up":
        return words
    return [*(word for word in words if not word.startswith("schedule.warmup_")), "schedule.warmup_steps=0"]


def gradient_norms(config) -> list[float]:
    """Of each block of a fresh net, of the mean loss over the first step's first rows."""
    task, module = assemble(parts.settled(config))
    if "val" not in module.store.splits:
        raise UserError("there is no held-out text to compare losses on: say data.val_path or data.val_fraction")
    micro = next(iter(module.train_dataloader()))[0]
    sums = task.loss(micro)
    (sums["loss"] / sums["targets"]).backward()
    return [norm(block) for block in engines.blocks(task.net)]


def norm(block: nn.Module) -> float:
    return float(sum(weight.grad.square().sum() for weight in block.parameters()) ** 0.5)


def table(found: list[Study]) -> str:
    heads = ["gradient, first layer", "last layer", "last / first", *(f"loss, {name}" for name in WARMUPS)]
    lines = [f"{'norm':<18}" + "".join(f"{head:>{len(head) + 3}}" for head in heads)]
    for one in found:
        numbers = [one.norms[0], one.norms[-1], one.norms[-1] / one.norms[0], *one.losses.values()]
        cells = (f"{n:>{len(head) + 3}.3g}" for n, head in zip(numbers, heads, strict=True))
        lines.append(f"{one.name:<18}" + "".join(cells))
    return "\n".join(lines)


def picture(found: list[Study], file: Path) -> None:
    """Gradient norms along the depth, and losses side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for one in found:
        depth = len(one.norms)
        left.plot([layer / max(1, depth - 1) for layer in range(depth)], one.norms, "o-", markersize=3, label=one.name)
    left.set(xlabel="depth: 0 the first layer, 1 the last", ylabel="gradient norm before training", yscale="log")
    left.legend(fontsize="small")
    for place, warmup in enumerate(WARMUPS):
        right.barh([i + 0.4 * place for i in range(len(found))], [one.losses[warmup] for one in found], 0.38,
                   label=warmup if warmup == "warm-up" else "no warm-up")  # fmt: skip
    right.set_yticks([i + 0.2 for i in range(len(found))], [one.name for one in found])
    right.invert_yaxis()
    losses = [loss for one in found for loss in one.losses.values()]
    right.set(xlabel="validation loss, nats per token", xlim=(min(losses) - 0.3, max(losses) + 0.1))
    right.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(name) for name in names(text)]

    arguments = parser(__doc__)
    arguments.add_argument("words", nargs="*", metavar="WORD", help="of training, as optim.lr=1e-3")
    arguments.add_argument("--depths", type=numbers, default=[4, 12, 24], metavar="4,12,...", help="layers")
    arguments.add_argument("--blocks", type=names, default=["pre", "post"], metavar="pre,post", help="of model/block")
    arguments.add_argument("--png", type=Path, metavar="FILE", help="draw gradients and losses")
    given = arguments.parse_args()
    answer(study, given.words, given.depths, given.blocks, given.png)


if __name__ == "__main__":
    main()
