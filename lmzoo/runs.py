"""From the words of a command line to the configuration of one run: what Hydra composed is checked and completed.

A run that is resumed or evaluated is the stored one, with few words changed; one that starts from a checkpoint takes
that checkpoint's net and tokenizer. Imports torch only where a checkpoint has to be opened.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from itertools import chain, count
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from . import checks, signatures
from .errors import UserError
from .literal import escaped, literal, load, plain, restore
from .ranges import check_ranges
from .schema import SCHEMAS

# what may be changed of a run that is resumed, and of a net that comes from a checkpoint
NOT_THE_RUN = ("trainer", "logger", "checkpoint")
NOT_THE_NET = re.compile(r"model\.((\w+_)?dropout|max_len|(attention|cross)\.backend)")
# of the data: what may be changed while the source stays
SAME_SOURCE = ("path", "batch_size", "micro_batch_size", "num_workers", "cache_dir")
# of the data: what a net was trained with, wherever the text is from
ROWS = ("packing", "row_length", *SAME_SOURCE[1:])
LENGTHS = ("max_steps", "max_tokens", "max_epochs")


def finish(composed: DictConfig, settings: DictConfig, name: str = "train") -> DictConfig:
    """Check what Hydra composed for the command `name` under its own `settings`, and complete it."""
    OmegaConf.set_struct(composed, False)
    checks.check_words(composed, SCHEMAS[name])
    checks.check_options(settings.runtime.choices)
    words = [word.lstrip("+~").partition("=")[0] for word in settings.overrides.task]
    choices = settings.runtime.choices
    if name != "train" and not composed.ckpt:
        raise UserError("no ckpt: say ckpt=RUN (a checkpoint file, a run's folder, or last)")
    if name == "generate":
        check_ranges(plain(composed))
        return composed
    if name == "evaluate":
        return measured(composed, words, choices)
    if composed.ckpt is not None:
        config = last_length_wins(resumed(composed, words, choices), words)
    else:
        config = started(composed, words, choices)
        if settings.mode is not None and settings.mode.name == "MULTIRUN":
            config.run_dir = escaped(settings.runtime.output_dir)
        elif config.run_dir is None:
            config.run_dir = fresh_folder(config.name)
    check_ranges(plain(config))
    return config


def started(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of a new run, from nothing or from the net of a checkpoint."""
    config = last_length_wins(typed, words)
    if config.init_from is not None:
        config = initialised(config, words)
    elif choices.model is None:
        raise UserError(f"no model: say model=NAME (one of {', '.join(checks.groups()['model'])}) or init_from=RUN")
    checks.check_size(choices.model, choices["size"])
    checks.check_pair(choices.model, config.model, choices.task, config.task)
    if config.name is None:
        config.name = "-".join(filter(None, (choices.model, choices.task)))
    signatures.check(plain(config))
    return config


def fresh_folder(name: str) -> str:
    """runs/DATE/TIME-NAME, a folder that is not there yet."""
    now, name = datetime.now(), re.sub(r"[^\w.-]+", "-", name)
    path = Path("runs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}-{name}")
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(2))
    return str(next(p for p in chain([path], numbered) if not p.exists()))


def last_length_wins(config: DictConfig, words: list[str]) -> DictConfig:
    """A run's length that is typed takes the place of the one that a recipe has set in another unit."""
    typed = [length for length in LENGTHS if f"trainer.{length}" in words]
    for length in LENGTHS if typed else ():
        if length not in typed:
            config.trainer[length] = None
    return config


def resumed(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of the run that `ckpt` names, with what was typed beside it."""
    for word in words:
        if word != "ckpt" and re.split(r"[./@]", word)[0] not in NOT_THE_RUN:
            raise UserError(f"{word}: ckpt={typed.ckpt} goes on with that run as it is; only trainer.*, logger.* and "
                            "checkpoint.* may be given beside it (init_from= starts a new run)")
    return with_words(typed, words, choices)


def measured(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of the run that `ckpt` names, to be evaluated on what was typed, else on data of its own."""
    others = [word for word in words if re.split(r"[./@]", word)[0] == "data"]
    if "data" in words:  # another source: its words, but rows and steps as the net knows them
        config = with_words(typed, [word for word in words if word not in ("split", *others)], choices)
        kept = {word: literal(config.data[word]) for word in ROWS if f"data.{word}" not in words}
        config.data = OmegaConf.merge(typed.data, kept)
        if "packing" in config.task:
            config.task.packing = config.data.packing
    else:
        for word in others:
            if word.removeprefix("data.") not in SAME_SOURCE:
                raise UserError(f"{word}: name the source that this word belongs to as well, data=NAME")
        config = with_words(typed, [word for word in words if word != "split"], choices)
    config.split = "whole" if others else typed.split
    return config


def with_words(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of the run that `ckpt` names, with the values that `words` have in `typed`."""
    from . import checkpoint

    file = checkpoint.find(typed.ckpt)
    config = derived_again(stored(file), typed)
    config.ckpt = escaped(str(file))
    folder = file.parent.parent  # wherever it has gone since
    config.run_dir = escaped(str(folder)) if (folder / "config.yaml").exists() else fresh_folder(config.name)
    for word in words:
        if word in checks.groups():  # trainer=ddp: the words of that file, not its defaults
            option = yaml.safe_load((checks.CONF / word / f"{choices[word]}.yaml").read_text(encoding="utf-8"))
            own = {key: value for key, value in option.items() if key != "defaults"}
            OmegaConf.update(config, word, own, merge=True)
        elif word != "ckpt":
            OmegaConf.update(config, word, literal(plain(OmegaConf.select(typed, word))), force_add=True)
    return config


def derived_again(config: DictConfig, typed: DictConfig) -> DictConfig:
    """`config` with its callbacks following the run's other words, as in `typed`, where they did when it was stored.

    A stored configuration has no interpolations: without this, a new `checkpoint.every_n_steps` would change nothing.
    """
    raw = OmegaConf.to_container(typed.callbacks, resolve=False) if "callbacks" in typed else {}
    again = OmegaConf.merge(config, {"callbacks": raw})
    for name, callback in raw.items():
        for word, value in callback.items():
            known = OmegaConf.select(config, f"callbacks.{name}.{word}")
            if "${" in str(value) and known == again.callbacks[name][word]:
                config.callbacks[name][word] = value
    return config


def stored(file: Path) -> DictConfig:
    """The configuration of the run that wrote the checkpoint `file`: its config.yaml, else the copy in it."""
    from . import checkpoint

    beside = file.parent.parent / "config.yaml"
    return load(beside) if beside.exists() else restore(checkpoint.read(file)["lmzoo"]["config"])


def initialised(config: DictConfig, words: list[str]) -> DictConfig:
    """`config` with the net (and tokenizer) of the checkpoint that `init_from` names."""
    for word in words:
        if re.split(r"[./@]", word)[0] in ("model", "size", "tokenizer") and not NOT_THE_NET.fullmatch(word):
            raise UserError(f"{word}: with init_from= the net and its tokenizer are the checkpoint's; "
                            "only dropout, the attention's backend and max_len may be changed")
    changes = {word: OmegaConf.select(config, word) for word in words if NOT_THE_NET.fullmatch(word)}
    path = Path(config.init_from)
    if (path / "config.yaml").exists():  # a run folder tells its net without torch
        source = load(path / "config.yaml")
        source = {"model": source.model, "tokenizer": source.tokenizer}
    elif path.exists() or config.init_from == "last":
        from . import load as load_net

        net = load_net(config.init_from)
        source = {"model": literal(net.config), "tokenizer": {"vocab_size": net.vocab_size}}
    else:
        raise UserError(f"init_from={path} does not exist: give a checkpoint file, a run folder or an exported folder")
    config.model = source["model"]
    for word, value in source["tokenizer"].items():
        config.tokenizer[word] = value
    for word, value in changes.items():
        OmegaConf.update(config, word, value)
    return config
