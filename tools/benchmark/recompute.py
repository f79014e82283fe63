"""What activation checkpointing costs in time and saves of memory, in lmzoo's whole training path.

python -m lmzoo.tools.benchmark recompute --families gpt,bert,t5 --dtype bf16 --json recompute.json

The model and rows of the benchmark `train`, with `trainer.activation_checkpointing` none, selective
and full, which take turns.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import train
from .measure import Row, by_turns, positive, ratio, some_of, spread


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", type=some_of(*train.FAMILIES), default=["gpt"], metavar="gpt,bert,t5")
    parser.add_argument("--dtype", type=some_of("fp32", "bf16"), default=["bf16"], metavar="fp32,bf16")
    parser.add_argument("--steps", type=positive, default=4, help="of an arm's turn")
    parser.add_argument("--rounds", type=positive, default=5, help="in which the arms take turns")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each arm")


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All families and dtypes, in a folder of their own that is removed afterwards."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        for family in given.families:
            for dtype in given.dtype:
                yield from table(family, dtype, device, given, Path(name))


def table(family: str, dtype: str, device: str, given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One family in one dtype: all kinds of activation checkpointing."""
    from lmzoo.memory import RECOMPUTE

    arms = {how: train.start_ours(
        family, dtype, device, train.SHAPES[device][family], [f"trainer.activation_checkpointing={how}"],
        given.threads, folder / family / dtype / how,
    ) for how in RECOMPUTE}  # fmt: skip
    times = by_turns({how: partial(arm.take, given.steps) for how, arm in arms.items()}, given.rounds)
    for arm in arms.values():
        arm.end()
    seconds = {how: [spent / given.steps for spent in taken] for how, taken in times.items()}
    for how, arm in arms.items():
        note = ""
        if how != "none":
            saved = arm.last["peak_memory_mb"] / arms["none"].last["peak_memory_mb"]
            note = f"this / none: time {ratio(seconds[how], seconds['none'])}, memory {saved:.2f}"
        speed = arm.said["tokens_per_step"] / spread(seconds[how])[0]
        yield Row(f"{family} {dtype}", f"lmzoo {how}", family, dtype, speed, arm.last["peak_memory_mb"],
                  spread(seconds[how]), first_s=arm.said["first_s"], note=note)
