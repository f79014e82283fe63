"""To and from Hugging Face's transformers, with the same logits: GPT-2, Llama, BERT, T5 v1.0 and v1.1.

What is called how stands in two tables, read both ways: architectures.py (configs) and weights.py (parameters).
Either needs transformers (`pip install 'lmzoo[hf]'`), and never the network.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import nn

from .. import checkpoint
from ..errors import UserError
from . import architectures, weights
from .tokenizer import quiet, read_tokenizer, transformers, write_tokenizer

__all__ = ["check_folder", "from_hf", "is_hf_folder", "read_tokenizer", "to_hf", "write_tokenizer"]

log = logging.getLogger(__name__)


def is_hf_folder(path: str | Path) -> bool:
    """Whether `path` is a folder that transformers' save_pretrained wrote (or that is laid out like one)."""
    try:
        return "model_type" in json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def from_hf(source) -> nn.Module:
    """The net of a transformers model, or of a folder that its save_pretrained wrote, in float32 and eval mode.

    It has `.config`, and `.tokenizer` where the folder holds one. Raises UserError for an architecture that
    lmzoo doesn't have, and for parameters that are missing or left over, by name.
    """
    is_folder = isinstance(source, str | Path)
    theirs = _load(source) if is_folder else source
    architecture, config = architectures.read(theirs.config.to_dict() | {"architectures": [type(theirs).__name__]})
    net = checkpoint.build(config)
    names = [name for name, _ in net.named_parameters()]
    wanted, given = set(weights.pair(architecture.weights, names)), {name for name, _ in theirs.named_parameters()}
    state = theirs.state_dict()  # a tied parameter stands here under each of its names
    unused = [name for name in sorted(given - wanted) if name.startswith(architecture.left_out)]
    _refuse(type(theirs).__name__, missing=wanted - set(state), unexpected=given - wanted - set(unused))
    if unused:
        log.warning("left out, since language modelling doesn't need them: %s", ", ".join(unused))
    net.load_state_dict(weights.to_ours(architecture.weights, names, state))
    if is_folder and (tokenizer := read_tokenizer(source)):
        net.tokenizer = tokenizer
    return net.eval()


def to_hf(model: nn.Module, folder: str | Path, words: Mapping | None = None) -> None:
    """Write `model`, with its tokenizer if it has one: transformers' from_pretrained(folder) gives the same logits.

    `words`: more of config.json that say nothing of the net, as {"id2label": {0: "bad", 1: "good"}}.
    Raises UserError for a net that Hugging Face doesn't have, naming the part, and for a folder that isn't empty.
    """
    from safetensors.torch import save_file

    folder = check_folder(folder)
    architecture, config = architectures.write(model)
    tokenizer = getattr(model, "tokenizer", None)
    config |= {**(words or {}), **_ids(model, tokenizer)}
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    _accept(config)
    state = weights.to_theirs(architecture.weights, {k: v.detach().cpu() for k, v in model.named_parameters()})
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder, model)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")  # last: makes it a model's
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors leaves it to its owner only


def check_folder(folder: str | Path) -> Path:
    """The folder as a path; UserError unless `to_hf` can make it, or it is there and empty."""
    folder = Path(folder)
    above = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not above.is_dir():
        raise UserError(f"{folder}: {above} is a file; give a new folder")
    if above == folder and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: give a new folder")
    if not os.access(above, os.W_OK):
        raise UserError(f"{folder}: nothing can be written to {above}; give a new folder elsewhere")
    return folder


def _ids(model: nn.Module, tokenizer) -> dict[str, int | None]:
    """The ids that a config.json names. A pad that is the eos is none to a model: its embedding would never learn."""
    ids = {role: getattr(tokenizer, role, None) for role in ("bos", "eos", "pad")}
    ids["pad"] = None if ids["pad"] == ids["eos"] else ids["pad"]
    if model.family == "decoder" and getattr(tokenizer, "chat_template", None):
        with suppress(UserError):  # of a template by which no answer ends
            if (end := tokenizer.chat.eos) != ids["eos"]:
                ids["eos"] = [id for id in (ids["eos"], end) if id is not None]
    ids |= {"decoder_start": getattr(tokenizer, "start", None)} if model.family == "encoder-decoder" else {}
    return {f"{role}_token_id": id for role, id in ids.items()}


def _config(folder: str | Path):
    """transformers' config of a folder, old spellings and defaults settled."""
    if not is_hf_folder(folder):
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json with a model_type")
    library = transformers()
    try:
        with quiet():
            return library.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a word of the wrong type, a rule of transformers' own
        raise UserError(f"{folder}/config.json: {_line(error)}") from error


def _load(folder: str | Path) -> nn.Module:
    """The transformers model of a folder; UserError for weights that are broken, missing or left over."""
    config = _config(folder)
    architecture = architectures.read(config.to_dict())[0]
    saved = [name for name in config.architectures or () if name in architecture.classes]
    cls = getattr(transformers(), (saved or architecture.classes)[0])
    try:
        with quiet():
            theirs, report = cls.from_pretrained(folder, config=config, local_files_only=True, output_loading_info=True)
    except Exception as error:  # safetensors, pickle and transformers each raise their own
        raise UserError(f"{folder}: its weights cannot be read: {_line(error)}") from error
    unexpected = {name for name in report["unexpected_keys"] if not name.startswith(architecture.left_out)}
    _refuse(folder, report["missing_keys"], unexpected)
    return theirs


def _accept(config: dict) -> None:
    """UserError if transformers would refuse this config.json."""
    library = transformers()
    try:
        with quiet():
            library.AutoConfig.for_model(**config)
    except Exception as error:
        raise UserError(f"transformers refuses such a {config['architectures'][0]}: {_line(error)}") from error


def _refuse(what, missing: set[str], unexpected: set[str]) -> None:
    for word, names in ("lacks", sorted(missing)), ("has left over", sorted(unexpected)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise UserError(f"{what} {word} {', '.join(names[:4])}{more}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
