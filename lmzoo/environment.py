"""What a run was started in: the command, the user's git revision, versions, device and threads."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from .errors import naming

PACKAGES = ("lmzoo", "torch", "lightning", "tokenizers")


def describe(devices: int) -> dict[str, object]:
    """The surroundings of this process, as plain values; `devices` is how many its run uses."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "git": revision(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "devices": devices,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def revision() -> dict[str, object] | None:
    """The commit of the current folder's repository, and whether tracked files differ from it; None without one."""
    try:
        commit, changes = (
            subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=20).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changes)}


def record(found: dict[str, object], file: Path, first_step: int) -> None:
    """Add what was found as a line of `file`, which has one for each start of the run."""
    with naming(file), open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"first_step": first_step, **found}) + "\n")
