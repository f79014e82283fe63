"""From a checkpoint to a net: what it says of its run, and its weights into one that may have grown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from torch import Tensor, nn

from .. import adapters
from ..errors import UserError
from .building import build
from .files import find, read

PREFIX = "net."
PER_ID = ("embed.tokens.weight", "head.weight", "head.bias")  # one row for each id of the vocabulary


def load(path: str | Path, trust: Sequence[str] = (), base: str | Path | None = None) -> nn.Module:
    """The net of a checkpoint (`path` as in `find`) in eval mode, with its `.config` and `.tokenizer`, and `.identity`:
    what the checkpoint says of its run.

    An adapter is merged into its base, which lies where the checkpoint says, or at `base`.
    """
    from ..tokenizer import Tokenizer
    from .base import adapted

    file = find(path)
    state = read(file)
    identity = identify(state, file)
    special = identity["config"].get("tokenizer", {}).get("special") or {}
    try:
        net = build(identity["config"]["model"], trust)
        found = weights(state)
        if identity["config"].get("adapter"):
            learned = adapted(state, file, trust, base)
            found = adapters.merge(adapters.weights(learned), adapters.scale(learned))
        load_weights(net, found, new=())
        net.tokenizer = Tokenizer(identity["tokenizer"], special, identity.get("chat_template"))
        net.identity = identity
    except UserError as error:
        raise UserError(f"{'' if str(error).startswith(str(file)) else f'{file}: '}{error}") from error
    return net.eval()


def identify(state: Mapping, path: str | Path) -> dict:
    """What the checkpoint `state` of the file `path` says of its run; UserError where lmzoo can't have written it."""
    if not isinstance(state, dict) or not {"lmzoo", "state_dict"} <= state.keys():
        raise UserError(f"{path} is no checkpoint of lmzoo: give a file that lmzoo wrote, or a run's folder")
    identity, states = state["lmzoo"], state["state_dict"]
    config = identity.get("config") if isinstance(identity, dict) else None
    wanted = {
        "lmzoo": isinstance(identity, dict),
        "lmzoo.config": isinstance(config, dict) and isinstance(config.get("model"), dict),
        "lmzoo.tokenizer": isinstance(identity, dict) and _is_tokenizer(identity.get("tokenizer")),
        "state_dict": isinstance(states, dict) and all(isinstance(weight, Tensor) for weight in states.values()),
    }
    if wanted["lmzoo.config"] and config.get("adapter"):
        wanted["lmzoo.config.adapter"] = isinstance(config["adapter"], dict)
        base = identity.get("base")
        words = ("path", "relative", "sha256")
        wanted["lmzoo.base"] = isinstance(base, dict) and all(isinstance(base.get(word), str) for word in words)
    for entry, sound in wanted.items():
        if not sound:
            raise UserError(f"{path} is no whole checkpoint of lmzoo: its entry {entry} is missing or broken; "
                            "take another of its run")
    return identity


def _is_tokenizer(text: object) -> bool:
    try:
        return bool(tokenizers.Tokenizer.from_str(text))
    except Exception:  # the library raises no narrower kind
        return False


def check_resumable(state: Mapping, path: str | Path, trust: Sequence[str] = ()) -> None:
    """Refuse the checkpoint `state` of `path` if no run can go on from it (weights that were not read pass)."""
    identity = identify(state, path)
    wanted = {"loops", "global_step", "pytorch-lightning_version", "store", "steps_taken"}
    if not wanted <= {*state, *identity} or not state.get("optimizer_states"):
        raise UserError(f"{path} holds a net, but not the state of its optimizer and its run: start a new run from it, "
                        f"init_from={path}")
    if not (found := weights(state)) and Path(path).is_dir():
        return
    try:
        with torch.device("meta"):
            net = build(identity["config"]["model"], trust)
            if identity["config"].get("adapter"):
                adapters.ready(net, identity["config"])
            compare(net, found)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    check_finite(found, path)


def check_finite(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Refuse weights from which no training can come to anything, naming the first."""
    for name, weight in state.items():
        if not weight.isfinite().all():
            raise UserError(f"{path}: {name} holds numbers that are not finite, from which nothing can be trained: "
                            "take an earlier checkpoint")


def weights(state: Mapping) -> dict[str, torch.Tensor]:
    """The net's own state dict out of a checkpoint's."""
    return {k.removeprefix(PREFIX): v for k, v in state["state_dict"].items() if k.startswith(PREFIX)}


def widened(state: Mapping[str, torch.Tensor], n_old: int, n_new: int) -> dict[str, torch.Tensor]:
    """The net's weights for a vocabulary that has grown: what is of an id is, for a new one, the mean over the old."""
    state = dict(state)
    for key in PER_ID if n_new > n_old else ():
        if key in state:
            old = state[key]
            new = old[:n_old].mean(0, keepdim=True).expand(n_new - n_old, *old.shape[1:])
            state[key] = torch.cat([old[:n_old], new, old[n_new:]])
    return state


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


def load_weights(net: nn.Module, state: Mapping[str, torch.Tensor], new: Sequence[str]) -> Report:
    """Copies `state` (the net's own keys) into `net` and reports what was loaded, is missing or is left over.

    Parts named in `new` may be missing, or left behind where the old one had another shape; tied weights stay tied.
    Raises UserError naming any other key that is missing, unexpected or of another shape, before anything is copied.
    """
    report = compare(net, state, new)
    net.load_state_dict({k: state[k] for k in report.loaded}, strict=False)
    return report


def compare(net: nn.Module, state: Mapping[str, torch.Tensor], new: Sequence[str] = ()) -> Report:
    """What `load_weights` would do; UserError for what it would refuse."""
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
    return Report(loaded, missing, unexpected)
