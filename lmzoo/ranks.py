"""The processes of one run before they are a group: the first settles the configuration, the others take it over.

A process that lmzoo or Lightning starts finds the configuration's path in its environment. Those that torchrun starts
are all alike, on one machine or many: they meet at the store that torchrun keeps for them, where the first leaves the
configuration once its data is prepared. So whatever depends on time or chance is the first one's.

A job of SLURM may be several such runs one after the other, of the same command: where it is put back into the queue,
the next one goes on in the folder of the one before, which is named by the job's number.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path

import yaml
from omegaconf import DictConfig

from .errors import STOPPED, Interrupted
from .literal import load, restore

RANK_CONFIG = "LMZOO_RANK_CONFIG"
PLACES = ("LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK")  # among processes, which Lightning believes of any origin
PATIENCE = timedelta(days=30)  # preparing a large corpus takes long; if the first fails, torchrun ends the others
_parent = os.getppid()
_runs = count()  # of this process: each hands over a configuration of its own


def by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def on_first_rank() -> bool:
    """Whether this process is the first of its run, which prepares, prints and writes for all."""
    place = "RANK" if by_torchrun() else "LOCAL_RANK" if RANK_CONFIG in os.environ else ""
    return not int(os.environ.get(place, 0))


def speaks() -> bool:
    """Whether this process is to say what has ended its run: the first rank, or another that has lost its parent."""
    return on_first_rank() or not by_torchrun() and os.getppid() != _parent


def follows() -> bool:
    """Whether another process settles the configuration of this one."""
    return RANK_CONFIG in os.environ or by_torchrun() and not on_first_rank()


@contextmanager
def leading() -> Iterator[None]:
    """Where a run's processes are started: their environment is this process's own, and afterwards it is as before.

    A LOCAL_RANK that another program has left counts for nothing; one of Lightning's would count in the next run.
    """
    before = dict(os.environ)
    if not by_torchrun() and RANK_CONFIG not in os.environ:
        for name in PLACES:
            os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def take_over() -> DictConfig:
    """The configuration that was settled for this process, once it is there."""
    if path := os.environ.get(RANK_CONFIG):
        return load(path)
    return restore(yaml.safe_load(_store().get(f"config-{next(_runs)}")))


def hand_over(file: Path) -> None:
    """Give the configuration that `file` holds to the processes that follow this one."""
    os.environ[RANK_CONFIG] = str(file.absolute())
    if by_torchrun() and on_first_rank():
        _store().set(f"config-{next(_runs)}", file.read_text(encoding="utf-8"))


@contextmanager
def leaving() -> Iterator[None]:
    """While a command prepares or ends, SIGTERM and SIGUSR1 end it with the code that asks for a rerun, and have its
    job of SLURM queue itself again; in training they mean the same, once the step is done and saved."""

    def leave(number: int, _: object) -> None:
        for each in earlier:
            signal.signal(each, signal.SIG_IGN)  # the process ends
        said = ["stopped by a signal outside of training; what was prepared is kept", requeue() * on_first_rank()]
        raise Interrupted("\n".join(filter(None, said)), exit_code=STOPPED)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def job_folder(name: str) -> Path | None:
    """runs/slurm/NUMBER-NAME, the folder of a run that is a job of SLURM; None for any other run."""
    number = os.environ.get("SLURM_JOB_ID")
    return Path("runs", "slurm", f"{number}-{name}") if number else None


def requeued() -> bool:
    """Whether SLURM has run this job before."""
    return "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0


def requeue() -> str:
    """Ask SLURM to put this job back into the queue; what became of it, empty where there is no job.

    SIGTERM comes from preemption and a time limit, and from scancel too, which marks the job as ending before: such a
    job, unless it is for its time, stays out of the queue, where its user wants it (a preempted one SLURM requeues).
    """
    if not (number := os.environ.get("SLURM_JOB_ID")):
        return ""
    _, about = _scontrol("show", "job", number)
    if (state := re.search(r"JobState=(?!RUNNING)\w+", about)) and "Reason=TimeLimit" not in about:
        return f"job {number} is being ended ({state[0]}): it is not put into the queue again"
    done, said = _scontrol("requeue", number)
    return f"scontrol requeue {number}: {'the job is in the queue again' if done else said}"


def _scontrol(*words: str) -> tuple[bool, str]:
    """(whether it was done, what was said) of one of SLURM's commands."""
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True)
    except OSError as error:
        return False, str(error)
    return not done.returncode, done.stdout if not done.returncode else done.stderr.strip() or f"code {done.returncode}"


def _store():
    """torchrun's own store, the part of it that belongs to lmzoo in this attempt (torchrun may start all again)."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    return PrefixStore(f"lmzoo/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
