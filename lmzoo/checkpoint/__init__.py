"""What a checkpoint holds, how it is written, found and read: the one room that knows.

A checkpoint is Lightning's dict of plain types (it opens with `torch.load(weights_only=True)`): the net's weights under
`state_dict` with the prefix `net.`, optimizer moments and loop counters, and under `lmzoo` the run's identity:
`config` (resolved; its `model` node is what `build` takes), `tokenizer` (its JSON), `wandb_id`, `version`.
"""

from .building import build
from .files import find, link, names, read, remove, write, write_shares
from .loading import PER_ID, Report, identify, load, load_weights, weights, widened

__all__ = [
    "PER_ID", "Report", "build", "find", "identify", "link", "load", "load_weights", "names", "read", "remove",
    "weights", "widened", "write", "write_shares",
]  # fmt: skip
