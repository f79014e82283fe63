"""Cost against size: training steps of lmzoo as one size grows, beside what their FLOPs say.

python -m lmzoo.tools.benchmark scale --family gpt --dtype bf16 --json scale.json --png scale.png

Each axis begins from the same model and lets one size grow: max_len (as many tokens in a step, in
fewer rows), d_model (d_ff with it, heads of 32), n_layers, batch_size. The sizes of an axis take
turns, each in a process of its own. The note says how long a step takes per FLOP, over the same of
the model that all axes begin from: above 1 a size costs more than arithmetic explains. The picture
draws tokens per second, dashed what the FLOPs say.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import train
from .measure import Row, by_turns, positive, some_of, spread

BASE = {"vocab_size": 8192, "d_model": 256, "n_layers": 4, "max_len": 256, "batch_size": 16}
AXES = {
    "max_len": [128, 256, 512, 1024, 2048, 4096],
    "d_model": [128, 256, 512, 1024],
    "n_layers": [2, 4, 8, 16],
    "batch_size": [1, 4, 16, 64],
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=train.FAMILIES, default="gpt")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--axes", type=some_of(*AXES), default=list(AXES), metavar="max_len,d_model,...")
    parser.add_argument("--steps", type=positive, default=2, help="of a size's turn")
    parser.add_argument("--rounds", type=positive, default=5, help="in which the sizes take turns")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each process")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw all axes to a new file")


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All axes, in a folder of their own that is removed afterwards."""
    import torch

    torch.set_num_threads(given.threads)
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as folder:
        for axis in given.axes:
            found[axis] = axis_rows(axis, device, given, Path(folder))
            yield from (row for _, row, _ in found[axis])
    if given.png:
        picture(found, given.png)


def shape(axis: str, size: int) -> dict[str, int]:
    """The sizes of a model and its batch at one point of an axis."""
    sizes = BASE | {axis: size}
    if axis == "max_len":
        sizes["batch_size"] = max(1, BASE["batch_size"] * BASE["max_len"] // size)
    return sizes | {"n_heads": sizes["d_model"] // 32, "d_ff": 4 * sizes["d_model"]}


def axis_rows(axis: str, device: str, given: argparse.Namespace, folder: Path) -> list[tuple[int, Row, float]]:
    """(size, what was measured, FLOPs of a token) along one axis."""
    from .arm import DTYPES

    arms = {size: train.start_ours(
        given.family, given.dtype, device, shape(axis, size), [], given.threads, folder / f"{axis}-{size}"
    ) for size in AXES[axis]}  # fmt: skip
    ceilings: list[float] = []
    turns = {size: partial(arm.take, given.steps) for size, arm in arms.items()}
    turns["ceiling"] = lambda: ceilings.append(train.ceiling(device, DTYPES[given.dtype]))
    times = by_turns(turns, given.rounds)
    for arm in arms.values():
        arm.end()

    def work(size: int) -> tuple[int, float]:
        """(tokens, FLOPs) of a step."""
        tokens = arms[size].shape["batch_size"] * arms[size].shape["max_len"]
        return tokens, tokens * arms[size].said["flops_per_token"]

    seconds = {size: spread([spent / given.steps for spent in times[size]]) for size in arms}
    base, found = seconds[BASE[axis]][0] / work(BASE[axis])[1], []
    for size, arm in arms.items():
        tokens, flops = work(size)
        note = f"{seconds[size][0] / flops / base:.2f} of the time per FLOP at {axis}={BASE[axis]}"
        row = Row(axis, f"lmzoo {axis}={size}", given.family, given.dtype, tokens / seconds[size][0],
                  arm.last["peak_memory_mb"], seconds[size], first_s=arm.said["first_s"],
                  mfu=flops / seconds[size][0] / max(ceilings), note=note)
        found.append((size, row, flops / tokens))
    return found


def picture(found: dict[str, list[tuple[int, Row, float]]], file: Path) -> None:
    """A panel for each axis, logarithmic: tokens per second as measured, and by the FLOPs from BASE's on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(found), 3.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for (axis, points), panel in zip(found.items(), panels, strict=True):
        sizes, rows, flops = zip(*points, strict=True)
        at = sizes.index(BASE[axis])
        model = [rows[at].tokens_per_s * flops[at] / one for one in flops]
        panel.loglog(sizes, [row.tokens_per_s for row in rows], "o-", color="tab:orange", label="measured")
        panel.loglog(sizes, model, "--", color="tab:gray", label="as its FLOPs say")
        panel.set_xticks(sizes, map(str, sizes))
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.set(xlabel=axis, ylabel="tokens/s")
    panels[0].legend(fontsize="small")
    figure.savefig(file, dpi=120)
