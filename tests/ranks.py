"""Run a test file as a script on two gloo ranks: `python FILE OUT` in Lightning's environment."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch


def run(file: str, folder: Path) -> list:
    """What each of two ranks of `file` saved at the path that is its only argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    environment = os.environ | shared | {"OMP_NUM_THREADS": "1"}
    outputs = [str(folder / f"rank{rank}.pt") for rank in range(2)]
    piped = {"stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, file, output], env=environment | {"LOCAL_RANK": rank}, **piped)
        for rank, output in zip("01", outputs, strict=True)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [torch.load(output) for output in outputs]


def save(result) -> None:
    """Called by the script, at its end."""
    torch.save(result, sys.argv[1])


def folder() -> Path:
    """Where the results of this run lie."""
    return Path(sys.argv[1]).parent


def rank() -> int:
    """This process's place among the two."""
    return int(os.environ["LOCAL_RANK"])
