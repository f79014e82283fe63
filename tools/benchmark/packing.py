"""Rows of many lengths: sentences packed into full rows, beside sentences padded in their batch.

python -m lmzoo.tools.benchmark packing --families bert,gpt --dtype fp32,bf16 --json packing.json

The sentences are those of lmzoo's default corpus, of 5 to 40 words. `single` reads one a row and
pads it, as is usual; `fit` puts whole sentences into rows of 128, each seeing itself only;
`isolate` does so too, but cuts. All three are lmzoo's whole training path with the model of the
benchmark `train`, take turns, and read about as many tokens a step. Tokens per second are of the
text: padding counts for nothing.
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import train
from .measure import Row, by_turns, positive, ratio, some_of, spread

PACKINGS = {"single": 128, "fit": 32, "isolate": 32}  # how, and how many rows in a step
LENGTH = 128
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
FEWEST, MOST = 5, 40  # words: what is longer is a table or a listing


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", type=some_of("bert", "gpt"), default=["bert", "gpt"], metavar="bert,gpt")
    parser.add_argument("--dtype", type=some_of("fp32", "bf16"), default=["fp32", "bf16"], metavar="fp32,bf16")
    parser.add_argument("--steps", type=positive, default=4, help="of an arm's turn")
    parser.add_argument("--rounds", type=positive, default=5, help="in which the arms take turns")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each arm")


def sentences() -> Iterator[str]:
    """The sentences of the default corpus, a line each."""
    from lmzoo.data.pydoc import read_pydoc

    for document in read_pydoc():
        for sentence in SENTENCE.split(document.text):
            if FEWEST <= len(words := sentence.split()) <= MOST:
                yield " ".join(words) + "\n"


def run(given: argparse.Namespace) -> Iterator[Row]:
    """All families and dtypes, in a folder of their own that is removed afterwards."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        (Path(name) / "sentences.txt").write_text("".join(sentences()), encoding="utf-8")
        for family in given.families:
            for dtype in given.dtype:
                yield from table(family, dtype, device, given, Path(name))


def table(family: str, dtype: str, device: str, given: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One family in one dtype: all ways to make rows."""
    arms = {}
    for packing, rows in PACKINGS.items():
        shape = train.SHAPES["cpu"][family] | {"max_len": LENGTH, "batch_size": rows}
        words = ["data=text", f"data.path={folder}/sentences.txt", "data.reader.split=line", f"data.packing={packing}"]
        place = folder / family / dtype / packing
        arms[packing] = train.start_ours(family, dtype, device, shape, words, given.threads, place)
    times = by_turns({packing: partial(arm.take, given.steps) for packing, arm in arms.items()}, given.rounds)
    of_token = {}
    for packing, arm in arms.items():
        arm.end()
        of_token[packing] = [spent / given.steps / arm.said["tokens_per_step"] for spent in times[packing]]
    for packing, arm in arms.items():
        note = f"{arm.said['tokens_per_step']:,} tokens a step"
        if packing != "single":
            note += f"; single / this, per token: {ratio(of_token['single'], of_token[packing], 'at least 2.5')}"
        yield Row(f"{family} {dtype}", f"lmzoo {packing}", family, dtype, 1 / spread(of_token[packing])[0],
                  arm.last["peak_memory_mb"], spread([spent / given.steps for spent in times[packing]]), note=note)
