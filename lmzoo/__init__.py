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
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UserError

__all__ = ["UserError", "build", "compose", "decoding", "fit", "hf", "load"]

_HOMES = {"compose": "config.compose", "fit": "train.train"}


def build(config: Mapping, trust: tuple[str, ...] = ()):
    """A fresh net of a model config, as `compose(...).model`, with its `.config`.

    Raises UserError for what the words of its parts can't be, and for a `_target_` as `load` does.
    """
    room = importlib.import_module(".checkpoint.building", __name__)
    whole = {"model": room.checked(config, trust), "trust": list(trust)}
    importlib.import_module(".checks", __name__).check_parts(whole)
    importlib.import_module(".signatures", __name__).check(whole)
    importlib.import_module(".ranges", __name__).check_ranges(whole)
    return room.build(config, trust)


def load(path: str | Path, trust: tuple[str, ...] = (), *, reads_text: bool = False):
    """The net of a checkpoint file, a run's folder (its newest whole checkpoint), or a Hugging Face folder.

    In eval mode, with `.config` and `.tokenizer`, which a Hugging Face folder may lack unless `reads_text`. A
    `_target_` that resolves outside lmzoo, torch.nn and the modules named in `trust` is refused (UserError).
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"load({path!r}): give a path, of a checkpoint file, a run's folder or an exported folder")
    try:
        if (Path(path) / "config.json").is_file():
            net = importlib.import_module(".hf", __name__).from_hf(path)
            if reads_text and not hasattr(net, "tokenizer"):
                raise UserError(f"{path} holds no tokenizer to read a text with: save the net's into it")
            return net
        return importlib.import_module(".checkpoint", __name__).load(path, trust)
    except OSError as error:
        raise UserError(importlib.import_module(".checks", __name__).explain(error)) from error


def __getattr__(name: str):
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(".")
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    if name in ("decoding", "hf"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
