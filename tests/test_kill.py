"""SIGKILL at any moment of training, most of all in the middle of a save, and the run still ends as it would have."""

import multiprocessing
import os
import random
import sys
import time

import pytest

from tiny_run import TASKS, digest, rows, spoken, texts

LONG = ("trainer.max_steps=170", "trainer.val_every_n_steps=4", "checkpoint.keep_last=2",
        "+callbacks.progress.seconds=0")  # fmt: skip
KILLS = 20


def command(fifo, words):
    """`python -m lmzoo.train WORDS` in a process of its own, which says all it says into `fifo`."""
    from lmzoo.train import main

    said = os.open(fifo, os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["lmzoo.train", *words]
    main()


def run(server, folder, words, n_lines=None, share=0.0):
    """(exit code, what was said) of a command, killed after so many lines of steps and a share of one more."""
    fifo = folder / "said"
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    process = server.Process(target=command, args=(fifo, words))
    process.start()
    said, clock = [], time.perf_counter()
    with open(fifo) as lines:
        for line in lines:
            said.append(line)
            if n_lines and line.startswith("step "):
                took, clock, n_lines = time.perf_counter() - clock, time.perf_counter(), n_lines - 1
                if n_lines == 0:
                    time.sleep(share * min(took, 1))
                    process.kill()
    process.join()
    return process.exitcode, "".join(said)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """Weights, moments and metrics.csv are those of the run that nobody disturbed; nothing else is left behind."""
    server = multiprocessing.get_context("forkserver")  # imports once, what would else take most of the time
    server.set_forkserver_preload(["lightning.pytorch", "matplotlib.figure", "lmzoo.callbacks", "lmzoo.tasks.clm"])
    draw, killed, whole, torn = random.Random(0), tmp_path / "killed", tmp_path / "whole", 0
    words = spoken(texts(tmp_path), *TASKS["clm"], *LONG)
    code, said = run(server, tmp_path, [*words, f"run_dir={whole}"])
    assert code == 0, said
    for _ in range(KILLS):
        saved = (killed / "checkpoints" / "MANIFEST.json").exists()
        going_on = [f"ckpt={killed}"] if saved else [*words, f"run_dir={killed}"]
        code, said = run(server, tmp_path, going_on, draw.randint(2, 11), draw.random())
        assert code == -9, said
        torn += any((killed / "checkpoints").glob("*.tmp"))
    assert torn, "no kill fell into a save: nothing was proved"
    code, said = run(server, tmp_path, [f"ckpt={killed}"])
    assert code == 0, said
    assert digest(killed) == digest(whole)
    assert rows(killed) == rows(whole)
    names = [sorted(file.name for file in (folder / "checkpoints").iterdir()) for folder in (killed, whole)]
    assert names[0] == names[1]
