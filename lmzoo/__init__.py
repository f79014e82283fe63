"""Pretrain language models of the three Transformer families from one set of building blocks.

    config = lmzoo.compose("model=gpt", "task=clm")     the checked configuration of a run
    model, metrics = lmzoo.fit(config)                  train it
    model = lmzoo.load("runs/...")                      a checkpoint, a run's folder or an exported folder, in eval mode
    lmzoo.build(config.model)                           a fresh net
    lmzoo.decoding.generate(model, input_ids)           also model.generate(...)
    lmzoo.hf.from_hf(source), lmzoo.hf.to_hf(model, folder)

Each is imported when it is first used, so that the commands answer a mistake without waiting for torch.
"""

import importlib
from pathlib import Path

from .errors import UserError

__all__ = ["UserError", "build", "compose", "decoding", "fit", "hf", "load"]

_HOMES = {"compose": "config.compose", "fit": "train.train", "build": "checkpoint.build"}


def load(path: str | Path, trust: tuple[str, ...] = ()):
    """The net of a checkpoint file, a run's folder (its newest whole checkpoint), or a Hugging Face folder.

    In eval mode, with `.config` and `.tokenizer`. A `_target_` that resolves outside lmzoo, torch.nn and the modules
    named in `trust` is refused (UserError).
    """
    if (Path(path) / "config.json").is_file():
        return importlib.import_module(".hf", __name__).from_hf(path)
    return importlib.import_module(".checkpoint", __name__).load(path, trust)


def __getattr__(name: str):
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(".")
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    if name in ("decoding", "hf"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
