"""The base of an adapter: its checkpoint holds what was trained alone, and names where the other weights lie.

`lmzoo.base` in it: `path` of the base, `relative` to the folder of the checkpoint (for runs that move together), and
`sha256` of the base's weights, which is compared whenever they are loaded.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from .. import adapters
from ..errors import UserError
from .building import build
from .files import find, read
from .loading import identify, load_weights, weights


def locate_base(path: str | Path) -> Path:
    """The file or exported folder that `path` means; UserError for a checkpoint that is an adapter itself."""
    if (Path(path) / "config.json").is_file():
        return Path(path)
    file = find(path)
    if identify(read(file, tensors=False), file)["config"].get("adapter"):
        raise UserError(f"{file} is an adapter itself: make it a net first, "
                        f"python -m lmzoo.tools.merge_adapter {path} FILE, and start from that")
    return file


def name_base(place: Path, net: nn.Module, folder: str | Path) -> dict[str, str]:
    """What the checkpoints of an adapter in `folder` say of its base, `net`, which lies at `place`."""
    relative = os.path.relpath(place, folder)
    return {"path": str(place.absolute()), "relative": relative, "sha256": adapters.digest(net)}


def load_base(identity: Mapping, file: str | Path, trust: Sequence[str] = (), given: str | Path | None = None):
    """The net on which the adapter in the checkpoint `file` was trained, from where that says, or from `given`."""
    from .. import load

    said = identity["base"]
    places = [Path(given)] if given else [Path(said["path"]), Path(file).parent / said["relative"]]
    place = next((place for place in places if place.exists()), None)
    advice = f"give its place, python -m lmzoo.tools.merge_adapter {file} FILE --base BASE"
    if place is None:
        raise UserError(f"{file} is an adapter, and its base {places[0]} does not exist: put it back, or {advice}")
    net = load(place, tuple(trust))
    if (found := adapters.digest(net)) != said["sha256"]:
        raise UserError(f"{file} is an adapter of other weights than those of {place} (sha256 {said['sha256'][:8]}, "
                        f"there {found[:8]}): put its base back, or {advice}")
    return net


def adapted(state: Mapping, file: str | Path, trust: Sequence[str] = (), given: str | Path | None = None) -> nn.Module:
    """The net of the adapter in the checkpoint `state` of `file`, on its base (`given` as for `load_base`)."""
    identity = identify(state, file)
    config = identity["config"]
    net = build(config["model"], trust)
    load_weights(net, load_base(identity, file, trust, given).state_dict(), new=adapters.new_parts(config))
    adapters.ready(net, config)
    load_weights(net, weights(state), new=())
    return net
