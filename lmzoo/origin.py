"""What a run starts from: a checkpoint of its own that it goes on with, a net that it takes over, or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from . import ranks, runs
from .literal import plain


@dataclass
class Origin:
    """Of a resumed run its checkpoint's `state` (without tensors) and `identity`. Of `init_from` the `source`, a net.

    `base`: the net whose weights are taken before training, the source, or an adapter's; `named`: what the checkpoints
    of an adapter say of it.
    """

    state: Mapping = field(default_factory=dict)
    identity: Mapping = field(default_factory=dict)
    source: object = None
    base: object = None
    named: Mapping = field(default_factory=dict)


def open_origin(config: DictConfig) -> Origin:
    """Open what `config.ckpt` or `config.init_from` names. Raises UserError for what no run can start from."""
    from . import checkpoint, load

    trust = tuple(config.trust)
    if config.ckpt:
        state = checkpoint.read(config.ckpt, tensors=False)
        identity = checkpoint.identify(state, config.ckpt)
        runs.check_unedited(plain(config), identity["config"])
        checkpoint.check_resumable(state, config.ckpt, trust)
        if not config.adapter:
            return Origin(state, identity)
        return Origin(state, identity, base=checkpoint.load_base(identity, config.ckpt, trust), named=identity["base"])
    if not config.init_from:
        return Origin()
    place = checkpoint.locate_base(config.init_from) if config.adapter else config.init_from
    source = load(place, trust, reads_text=True)
    if not ranks.follows():  # the first rank's configuration has the task's head by now
        runs.check_unedited({"model": plain(config.model)}, {"model": source.config}, free=runs.NOT_THE_NET)
    checkpoint.check_finite(source.state_dict(), config.init_from)
    named = checkpoint.name_base(place, source, Path(config.run_dir) / "checkpoints") if config.adapter else {}
    return Origin(source=source, base=source, named=named)
