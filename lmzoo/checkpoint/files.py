"""Checkpoints on the disk: written, found and read. One is a file, or a folder that several ranks wrote to.

It takes its name only when it is whole, and the folder's MANIFEST.json then notes its sha256, newest last. So a kill
at any moment leaves the previous checkpoint whole, and one that is damaged later is known by name and passed over.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from ..errors import UserError
from . import folders

MANIFEST = "MANIFEST.json"
PROGRAMS = {".pt2": "torch.export.load", ".onnx": "onnxruntime"}  # endings of exported ones, and what runs them
NAMED = re.compile(r"GLOBAL (\S+)")  # in torch's words, what the file would have called

log = logging.getLogger(__name__)


def find(path: str | Path) -> Path:
    """The checkpoint file that `path` means: a file, a run folder (its newest whole one), or "last" (the newest run's).

    Raises UserError where there is none, naming each damaged file that was passed over.
    """
    path = newest_run() if str(path) == "last" and not Path(path).exists() else Path(path)
    if _is_one(path) and path.suffix not in PROGRAMS:
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not path.exists():
        raise UserError(f"{path} does not exist: give a checkpoint file or a run folder")
    program = next((file for file in (folder, *folder.glob("*")) if file.suffix in PROGRAMS), None)
    if program and not (folder / MANIFEST).exists():
        raise UserError(f"{program} is an exported program, which {PROGRAMS[program.suffix]} runs without lmzoo: give "
                        "the run that it was made of, or a folder that export --to hf has made of that")
    entries, damaged = _entries(folder), []
    listed = entries or {}
    for name, digest in reversed(listed.items()):
        file = folder / name
        if file.exists() and _sha256(file) == digest:
            if damaged:
                log.warning("%s: damaged (their sha256 is another): %s; taking %s", folder, ", ".join(damaged), name)
            return file
        damaged += [name] if file.exists() else []
    unlisted = [file for file in folder.glob("*.ckpt") if file.name not in listed and _is_one(file) and _is_torch(file)]
    unlisted = ", ".join(map(str, sorted(unlisted, key=lambda file: file.stat().st_mtime_ns, reverse=True)))
    known = f" that its {MANIFEST} lists" if entries is not None else f" that is known, since {_broken(folder)}"
    raise UserError(f"{path} has no whole checkpoint" + (f" (damaged: {', '.join(damaged)})" if damaged else "")
                    + (f"{known}; give one of its files by name: {unlisted}" if unlisted else ""))


def newest_run() -> Path:
    """The folder under runs/ that was saved last, which is said; those are left out in which a process is training."""
    manifests = sorted(Path("runs").glob(f"**/{MANIFEST}"), key=lambda manifest: manifest.stat().st_mtime_ns)
    folders = [manifest.parent.parent for manifest in reversed(manifests)]
    if not folders:
        raise UserError("last: no run under runs/ has a checkpoint yet")
    if (found := next((folder for folder in folders if not in_training(folder)), None)) is None:
        raise UserError(f"last: each run under runs/ is in training at the moment; name one, as {folders[0]}")
    log.warning("last is %s", found)
    return found


def in_training(folder: Path) -> bool:
    """Whether a living process holds the lock of a run's folder."""
    lock = FileLock(folder / ".lock")
    if not (folder / ".lock").exists():
        return False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def read(path: str | Path, tensors: bool = True) -> dict:
    """A checkpoint's dict, after its sha256 was compared with the manifest beside it (if it is listed there).

    Tensors are on the CPU; without `tensors` those of the net and the optimizers may be left out. Raises UserError for
    a file that is damaged, or is no checkpoint of plain types.
    """
    path = Path(path)
    if (entries := _entries(path.parent)) is None:
        log.warning("%s is not compared with its sha256: %s", path, _broken(path.parent))
    digest = (entries or {}).get(path.name)
    if digest and _sha256(path) != digest:
        raise UserError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}; take another of its run")
    if path.exists() and not (_is_one(path) and _is_torch(path)):
        raise UserError(f"{path} is not a whole checkpoint: give a file that lmzoo wrote, or a run's folder")
    try:
        if path.is_dir() and tensors:
            return folders.load(path)
        file = path / folders.REST if path.is_dir() else path
        return torch.load(file, map_location="cpu", weights_only=True, mmap=not tensors)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give a checkpoint file or a run folder") from error
    except UnpicklingError as error:  # whose text says how to open it all the same
        if name := NAMED.search(str(error)):
            raise UserError(f"{path} holds more than plain data ({name[1]}): not opened; it is no checkpoint of "
                            "lmzoo") from error
        raise UserError(f"{path} is not a whole checkpoint of plain types: give a file that lmzoo wrote") from error
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "it ends too early")
        raise UserError(f"{path} is not a whole checkpoint of plain types: {reason}") from error


def write(state: Mapping, path: str | Path, listed: bool = True) -> None:
    """Writes `state` at `path`: beside it first, opened once as a stranger would, then in one move; notes its sha256.

    Not `listed`: a file that is no part of a run's folder, or must not be taken for its newest; nothing is noted.
    Raises what the file system or torch raises (full disk, a value that is not plain), leaving what was there whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as (temporary, file):
        sink = _Hashed(file)
        try:
            torch.save(state, sink)
        except RuntimeError as error:  # torch's archive writer hides the file system's reason
            raise sink.error or error from None
        file.flush()
        torch.load(temporary, weights_only=True, map_location="cpu", mmap=True)
    if listed:
        _note(path.parent, {path.name: sink.sha256.hexdigest()})


def write_shares(state: dict, path: str | Path) -> None:
    """Writes `state` as a folder at `path`, with each rank's share of it; to be called on all ranks."""
    path = Path(path)
    temporary, first = path.with_name(path.name + ".tmp"), not dist.is_initialized() or dist.get_rank() == 0
    if first:
        _clear(temporary)
    if dist.is_initialized():
        dist.barrier()
    try:
        folders.save(state, temporary)
    except BaseException:
        if first:
            _clear(temporary)
        raise
    if first:
        _move(temporary, path)
        _note(path.parent, {path.name: _sha256(path)})


def link(path: str | Path, name: str) -> None:
    """Gives the checkpoint at `path` a second name in its folder; a copy where no hard link can be."""
    path = Path(path)
    temporary = path.with_name(name + ".tmp")
    _clear(temporary)
    if path.is_dir():
        shutil.copytree(path, temporary, copy_function=_link)
    else:
        _link(path, temporary)
    _move(temporary, path.with_name(name))
    _note(path.parent, {name: _manifest(path.parent)[path.name]})


def remove(path: str | Path) -> None:
    """Removes one name of a checkpoint from its folder, then from the manifest: a kill between leaves no stray file."""
    path = Path(path)
    _clear(path)
    _note(path.parent, {path.name: None})


def names(folder: str | Path) -> list[str]:
    """Names of a folder's checkpoints in the order in which they were written."""
    return list(_manifest(Path(folder)))


def _entries(folder: Path) -> dict[str, str] | None:
    """{file name: sha256}, in the order of writing; None where a folder's manifest cannot be read."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        return None
    return entries if isinstance(entries, dict) else None


def _broken(folder: Path) -> str:
    return f"{folder / MANIFEST} cannot be read (it was cut short, or edited)"


def _manifest(folder: Path) -> dict[str, str]:
    """The same; empty where it cannot be read."""
    return _entries(folder) or {}


def _note(folder: Path, entries: Mapping[str, str | None]) -> None:
    """Moves `entries` to the manifest's end; an entry of None leaves it."""
    kept = {name: digest for name, digest in _manifest(folder).items() if name not in entries}
    kept |= {name: digest for name, digest in entries.items() if digest}
    with _replacing(folder / MANIFEST) as (_, file):
        file.write(json.dumps(kept, indent=1).encode())


def _is_one(path: Path) -> bool:
    """Whether there is a file at `path`, or a folder that `write_shares` made."""
    return path.is_file() or (path / folders.REST).is_file()


def _is_torch(path: Path) -> bool:
    return is_zipfile(path / folders.REST if path.is_dir() else path)


def _link(path: str | Path, other: str | Path) -> None:
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def _clear(path: Path) -> None:
    """Leaves nothing at `path`."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _move(temporary: Path, path: Path) -> None:
    """Gives what is whole at `temporary` the name `path`: in one move, unless a folder had that name or gets it."""
    if temporary.is_dir() or path.is_dir():
        _clear(path)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # where both were already one file, the move did nothing
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Returns when the folder's names are on the disk."""
    if hasattr(os, "O_DIRECTORY"):
        number = os.open(folder, os.O_DIRECTORY)
        os.fsync(number)
        os.close(number)


@contextmanager
def _replacing(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """(temporary path, open file) beside `path`; on leaving it is on the disk and has `path`'s name, or is gone."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield temporary, file
            file.flush()
            os.fsync(file.fileno())
        _move(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class _Hashed:
    """A file to write to that sums up what passes through it."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _sha256(path: Path) -> str:
    """Of a file; of a folder that of its files' names and sums."""
    if path.is_dir():
        sums = [f"{_sha256(file)}  {file.name}\n" for file in sorted(path.iterdir())]
        return hashlib.sha256("".join(sums).encode()).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
