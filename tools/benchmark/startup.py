"""What surrounds the arithmetic: seconds from a command to its first step or answer; a step of no net.

python -m lmzoo.tools.benchmark startup --json startup.json

    first      from the command to the first step done of a default run, on a corpus that was
               prepared before
    help       `--help`
    mistake    a configuration that is refused
    loop       a step of a default run, with its bar, logs and loader, whose net does nothing and
               has one weight
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .measure import Row, by_turns, positive, spread

COMMANDS = {  # words of `lmzoo.train`, how the line begins at which the clock stops (None: the end), what is wanted
    "first": (["model=gpt", "task=clm", "trainer.max_steps=1"], "step 1/1", "at most 10 s"),
    "help": (["--help"], None, "at most 1.5 s"),
    "mistake": (["model=gptt", "task=clm"], None, "at most 1.5 s"),
}
WARM, STEPS = 50, 200  # of the loop: before the clock, and in a round


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, default=3, help="of each measurement, in which they take turns")


def run(given: argparse.Namespace) -> Iterator[Row]:
    """Commands, then the loop, in a folder of their own that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="lmzoo-benchmark-") as name:
        until(COMMANDS["first"][0], None, Path(name))  # prepares the corpus
        arms = {what: partial(until, words, line, Path(name)) for what, (words, line, _) in COMMANDS.items()}
        for what, seconds in by_turns(arms, given.rounds).items():
            words, _, wanted = COMMANDS[what]
            yield Row(what, f"lmzoo.train {' '.join(words)}", seconds=spread(seconds), note=f"wanted: {wanted}")
        yield Row("loop", "lmzoo, a net that does nothing", "decoder", seconds=spread(loop(given.rounds, Path(name))),
                  note="wanted: under 0.0015 s a step")


def until(words: list[str], line: str | None, folder: Path) -> None:
    """Run `lmzoo.train` until it prints a line that begins so, or to its end."""
    command = [sys.executable, "-m", "lmzoo.train", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder,
                          env=environment) as process:
        for said in process.stdout:
            if line and said.startswith(line):
                process.kill()
                return
    if line:
        raise RuntimeError(f"{' '.join(command)} has ended without a line {line} ...")


class Terminal(io.StringIO):
    """Where a bar is drawn, and nobody sees it."""

    def isatty(self) -> bool:
        return True


def loop(rounds: int, folder: Path) -> list[float]:
    """Seconds of a step, the mean of each round."""
    import torch
    from lightning.pytorch import Callback

    from lmzoo import compose, parts
    from lmzoo.train import assemble

    class Nothing(torch.nn.Module):
        family, max_positions = "decoder", None

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, 1))

        def forward(self, input_ids, *_, readout=None, **__):
            return {"loss": self.weight.sum()}

    class Clock(Callback):
        times: list[float] = []

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step >= WARM and (trainer.global_step - WARM) % STEPS == 0:
                self.times.append(time.perf_counter())

    words = ["model=gpt", "task=clm", "trainer.accelerator=cpu", f"trainer.max_steps={WARM + rounds * STEPS + 1}",
             "trainer.val_every_n_steps=null", f"run_dir={folder}/loop"]
    config = parts.settled(compose(*words))
    task, module = assemble(config)
    task.net = Nothing()
    module.val_dataloader = lambda: []
    trainer, clock, shown = parts.build_trainer(config, task.total_steps), Clock(), sys.stdout
    trainer.callbacks.append(clock)
    sys.stdout = Terminal()
    try:
        trainer.fit(task, datamodule=module)
    finally:
        sys.stdout = shown
        parts.end(trainer)
    return [(end - begin) / STEPS for begin, end in zip(clock.times, clock.times[1:], strict=False)]
