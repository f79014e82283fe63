"""From a checkpoint to a net: what it says of its run, and its weights into one that may have grown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import UserError
from .building import build
from .files import find, read

PREFIX = "net."
PER_ID = ("embed.tokens.weight", "head.weight", "head.bias")  # one row for each id of the vocabulary


def load(path: str | Path, trust: Sequence[str] = ()) -> nn.Module:
    """The net of a checkpoint (`path` as in `find`) in eval mode, with its `.config` and `.tokenizer`."""
    from ..tokenizer import Tokenizer

    file = find(path)
    state = read(file)
    identity = identify(state, file)
    net = build(identity["config"]["model"], trust)
    net.load_state_dict(weights(state))
    special = identity["config"].get("tokenizer", {}).get("special") or {}
    net.tokenizer = Tokenizer(identity["tokenizer"], special)
    return net.eval()


def identify(state: Mapping, path: str | Path) -> dict:
    """What the checkpoint `state` of the file `path` says of its run."""
    if not isinstance(state, dict) or not {"lmzoo", "state_dict"} <= state.keys():
        raise UserError(f"{path} is no checkpoint of lmzoo: give a file that lmzoo wrote, or a run's folder")
    return state["lmzoo"]


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
