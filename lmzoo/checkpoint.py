"""What a checkpoint holds, how it is written, found and read: the one file that knows.

A checkpoint is Lightning's dict of plain types (it opens with `torch.load(weights_only=True)`): the net's weights under
`state_dict` with the prefix `net.`, optimizer moments and loop counters, and under `lmzoo` the run's identity:
`config` (resolved; its `model` node is what `build` takes), `tokenizer` (its JSON), `wandb_id`, `version`.

A file takes its name only when it is whole, and the folder's MANIFEST.json then notes its sha256, newest last. So a
kill at any moment leaves the previous checkpoint whole, and a file damaged later is known by name and passed over.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torch import nn

from .errors import UserError

MANIFEST = "MANIFEST.json"
PREFIX = "net."
TRUSTED = ("lmzoo.blocks", "lmzoo.models", "torch.nn")

log = logging.getLogger(__name__)


# Building a net from a config that may come from a stranger's file


def build(config: Mapping, trust: Sequence[str] = ()) -> nn.Module:
    """The net that a model config describes; `net.config` is that config, resolved, as a plain dict.

    A DictConfig is resolved where it stands. Raises UserError for an interpolation in a plain dict, for sizes that do
    not fit, and for a `_target_` anywhere in the tree whose resolved object was defined outside lmzoo.blocks,
    lmzoo.models, torch.nn and the modules named in `trust`, whatever the path that leads to it.
    """
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    for key, value in _leaves(plain, "model"):
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{key}={value!r} is an interpolation: resolve the config before building from it")
        if key.endswith("._target_"):
            _check_target(key, value, tuple(trust))
    if "_target_" not in plain:
        raise UserError("the model config has no _target_: it must name a class of lmzoo.models")
    try:
        net = instantiate(plain, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError | ValueError):  # the part's own words, without hydra's around them
            raise UserError(str(error.__cause__)) from error
        raise
    net.config = plain
    return net


def _leaves(node: object, key: str) -> Iterable[tuple[str, object]]:
    """(dotted key, value) of every leaf of a tree of dicts and lists."""
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _leaves(child, f"{key}.{i}")
    else:
        yield key, node


def _check_target(key: str, target: object, trust: tuple[str, ...]) -> None:
    refusal = f"{key}={target!r} is not a part of lmzoo or torch.nn: name its module in trust=(...) if you trust it"
    packages = {module.partition(".")[0] for module in (*TRUSTED, *trust)}
    if not isinstance(target, str) or target.partition(".")[0] not in packages:
        raise UserError(refusal)  # before resolving, which would import whatever the name says
    try:
        module = getattr(get_object(target), "__module__", None)
    except Exception as error:
        raise UserError(f"{key}={target!r} does not exist: {str(error).splitlines()[0]}") from error
    if not any(module == name or str(module).startswith(name + ".") for name in (*TRUSTED, *trust)):
        raise UserError(refusal)


# Loading


def load(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """The net of a checkpoint (`path` as in `find`) in eval mode, with its `.config` and `.tokenizer`."""
    from .tokenizer import Tokenizer

    file = find(path)
    state = read(file)
    identity = state["lmzoo"]
    net = build(identity["config"]["model"], trust)
    net.load_state_dict(weights(state))
    special = identity["config"].get("tokenizer", {}).get("special") or {}
    net.tokenizer = Tokenizer(identity["tokenizer"], special)
    return net.eval()


def weights(state: Mapping) -> dict[str, torch.Tensor]:
    """The net's own state dict out of a checkpoint's."""
    return {k.removeprefix(PREFIX): v for k, v in state["state_dict"].items() if k.startswith(PREFIX)}


@dataclass(frozen=True)
class Report:
    """What `load_weights` did, as lists of parameter names."""

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} weights loaded"]
        parts += [f"new: {', '.join(self.missing)}"] if self.missing else []
        parts += [f"left behind: {', '.join(self.unexpected)}"] if self.unexpected else []
        return "; ".join(parts)


def load_weights(net: nn.Module, state: Mapping[str, torch.Tensor], new: Sequence[str] = ("head",)) -> Report:
    """Copies `state` (the net's own keys) into `net` and reports what was loaded, is missing or is left over.

    Parts named in `new` may be missing, or left behind where the old one had another shape; tied weights stay tied.
    Raises UserError naming any other key that is missing, unexpected or of another shape, before anything is copied.
    """
    own = net.state_dict()
    loaded = [k for k in own if k in state and state[k].shape == own[k].shape]
    misfits = [k for k in own if k in state and state[k].shape != own[k].shape]
    missing = [k for k in own if k not in loaded]
    unexpected = [k for k in state if k not in loaded]
    renewed = tuple(f"{part}." for part in new)
    faults = {
        "missing": [k for k in missing if k not in misfits and not k.startswith(renewed)],
        "unexpected": [k for k in unexpected if k not in misfits and not k.startswith(renewed)],
        "of another shape": [
            f"{k} {tuple(state[k].shape)}, here {tuple(own[k].shape)}" for k in misfits if not k.startswith(renewed)
        ],
    }
    if any(faults.values()) or not loaded:
        listed = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in faults.items() if keys)
        raise UserError(f"the weights do not fit the model: {listed or 'no key in common'}")
    net.load_state_dict({k: state[k] for k in loaded}, strict=False)
    return Report(loaded, missing, unexpected)


# Files


def find(path: str | Path) -> Path:
    """The checkpoint file that `path` means: a file, a run folder (its newest whole one), or "last" (the newest run's).

    Raises UserError where there is none, naming each damaged file that was passed over.
    """
    if str(path) == "last" and not Path(path).exists():
        manifests = sorted(Path("runs").glob(f"**/{MANIFEST}"), key=lambda m: m.stat().st_mtime_ns)
        if not manifests:
            raise UserError("ckpt=last: no run under runs/ has a checkpoint yet")
        path = manifests[-1].parent.parent
    path = Path(path)
    if path.is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    damaged = []
    for name, digest in reversed(_manifest(folder).items()):
        file = folder / name
        if file.is_file() and _sha256(file) == digest:
            return file
        if file.exists():
            damaged.append(name)
            log.warning("%s is damaged (its sha256 is not the one in %s): taking the one before it", file, MANIFEST)
    if not path.exists():
        raise UserError(f"{path} does not exist: give a checkpoint file or a run folder")
    raise UserError(f"{path} has no whole checkpoint" + (f" (damaged: {', '.join(damaged)})" if damaged else ""))


def read(path: str | Path, map_location: object = "cpu") -> dict:
    """A checkpoint's dict, after its sha256 was compared with the manifest beside it (if it is listed there).

    Raises UserError for a file that is damaged, or is no checkpoint of plain types.
    """
    path = Path(path)
    digest = _manifest(path.parent).get(path.name)
    if digest and _sha256(path) != digest:
        raise UserError(f"{path} is damaged: its sha256 is not the one in {MANIFEST}; take another of its run")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give a checkpoint file or a run folder") from error
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "it ends too early")
        raise UserError(f"{path} is not a whole checkpoint of plain types: {reason}") from error


def write(state: Mapping, path: str | Path) -> None:
    """Writes `state` at `path`: beside it first, opened once as a stranger would, then in one move; notes its sha256.

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
    _note(path.parent, {path.name: sink.sha256.hexdigest()})


def link(path: str | Path, name: str) -> None:
    """Gives the checkpoint at `path` a second name in its folder, in one move; a copy where no hard link can be."""
    path = Path(path)
    temporary = path.with_name(name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, path.with_name(name))
    temporary.unlink(missing_ok=True)  # where both were already one file, the move did nothing
    _note(path.parent, {name: _manifest(path.parent)[path.name]})


def remove(path: str | Path) -> None:
    """Removes one name of a checkpoint from its folder and from the manifest."""
    path = Path(path)
    _note(path.parent, {path.name: None})
    path.unlink(missing_ok=True)


def names(folder: str | Path) -> list[str]:
    """Names of a folder's checkpoints in the order in which they were written."""
    return list(_manifest(Path(folder)))


def _manifest(folder: Path) -> dict[str, str]:
    """{file name: sha256}, in the order of writing; empty where a folder has no manifest that can be read."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _note(folder: Path, entries: Mapping[str, str | None]) -> None:
    """Moves `entries` to the manifest's end; an entry of None leaves it."""
    kept = {name: digest for name, digest in _manifest(folder).items() if name not in entries}
    kept |= {name: digest for name, digest in entries.items() if digest}
    with _replacing(folder / MANIFEST) as (_, file):
        file.write(json.dumps(kept, indent=1).encode())


@contextmanager
def _replacing(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """(temporary path, open file) beside `path`; on leaving it is on the disk and has `path`'s name, or is gone."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield temporary, file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name itself is on the disk only after this
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


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
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
