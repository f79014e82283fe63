"""What a checkpoint holds, how it is written, found and read: the one room that knows.

A checkpoint is Lightning's dict of plain types (it opens with `torch.load(weights_only=True)`): the net's weights under
`state_dict` with the prefix `net.`, optimizer moments and loop counters, and under `lmzoo` the run's identity:
`config` (resolved; its `model` node is what `build` takes), `tokenizer` (its JSON), `wandb_id`, `version`.
"""

from .base import load_base, locate_base, name_base
from .building import build
from .files import find, in_training, link, names, read, remove, write, write_shares
from .loading import check_finite, check_resumable, identify, load, load_weights, weights, widened

__all__ = [
    "build", "check_finite", "check_resumable", "find", "identify", "in_training", "link", "load", "load_base",
    "load_weights", "locate_base", "name_base", "names", "read", "remove", "weights", "widened", "write",
    "write_shares",
]  # fmt: skip
