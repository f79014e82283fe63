"""What the benchmarks share: arms timed by turns, the peak memory of a command, and a row of results."""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A process remembers the memory of the one that started it, so the command is started from one that holds next to none.
LAUNCHER = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
sys.exit(done.stderr) if done.returncode else print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def some_of(*names: str) -> Callable[[str], list[str]]:
    """The type of an option that takes some of `names`, with commas between."""
    def chosen(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in names]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return text.split(",")

    return chosen


def positive(text: str) -> int:
    """The type of an option that takes a whole number above 0."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


@dataclass
class Row:
    """What was measured of which arm (ours begin with "lmzoo"); None where a number has no meaning.

    `seconds` are (median, lowest, highest) over the rounds; `note` compares with other rows.
    """

    what: str
    arm: str
    family: str | None = None
    dtype: str | None = None
    tokens_per_s: float | None = None
    peak_memory_mb: float | None = None
    seconds: tuple[float, float, float] | None = None
    disk_mb: float | None = None
    first_s: float | None = None  # until the first step was done
    mfu: float | None = None
    note: str = ""

    def __str__(self) -> str:
        numbers = [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        numbers += ["{:.3g} s [{:.3g} - {:.3g}]".format(*self.seconds)] if self.seconds else []
        numbers += [f"{self.peak_memory_mb:,.0f} MB of memory"] if self.peak_memory_mb else []
        numbers += [f"{self.disk_mb:,.1f} MB of disk"] if self.disk_mb else []
        numbers += [f"MFU {self.mfu:.1%}"] if self.mfu else []
        numbers += [f"first after {self.first_s:.1f} s"] if self.first_s else []
        return f"{self.what:<10} {self.arm:<38} {'  '.join([*numbers, self.note])}"


def by_turns(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round; every other round goes through the arms backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            gc.collect()
            begin = time.perf_counter()
            arms[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lowest, highest)"""
    return statistics.median(values), min(values), max(values)


def ratio(above: Sequence[float], below: Sequence[float], wanted: str | None = None) -> str:
    """What the quotients of two arms' seconds, round by round, come to, beside what is wanted of them."""
    said = "{:.2f} [{:.2f} - {:.2f}]".format(*spread([a / b for a, b in zip(above, below, strict=True)]))
    return f"{said}, wanted: {wanted}" if wanted else said


def peak_memory(command: Sequence[str]) -> float:
    """MB that the largest process of a command's tree held at its peak."""
    launched = subprocess.run([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True, check=True)
    return int(launched.stdout) * (1 if sys.platform == "darwin" else 1024) / 1e6


def disk(folder: Path) -> float:
    """MB of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
