"""From the words of a command line to the configuration of one run: what Hydra composed is checked and completed.

A run that is resumed or evaluated is the stored one, with few words changed; one that starts from a checkpoint takes
that checkpoint's net and tokenizer. Imports torch only where a checkpoint has to be opened.
"""

import os
import re
from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from itertools import chain, count
from operator import getitem
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import checks, measures, mixing, ranks, signatures, texts
from .effects import check_effects
from .errors import UserError
from .literal import escaped, literal, load, plain, restore
from .ranges import check_ranges, nodes
from .schema import SCHEMAS, Adapter

# what may be changed of a run that is resumed, and of a net that comes from a checkpoint
NOT_THE_RUN = ("trainer", "logger", "checkpoint", "trust")
# of the trainer: what an evaluation depends on
EVALUATED = ("devices", "num_nodes", "strategy", "precision", "accelerator", "limit_val_batches")
# what may differ in a config.yaml from the run's own: what is changed by words, follows from others, or moves no number
# (texts that have moved are known by their store)
FREE = re.compile(rf"({'|'.join(NOT_THE_RUN)}|callbacks\.\w+\.(?!_target_)|ckpt|run_dir|data\.(sources\.\w+\.)?"
                  r"((val_|test_)?path|cache_dir|num_workers|processes|micro_batch_size)\b).*")
NOT_THE_NET = re.compile(r"model\.((\w+_)?dropout|max_len|(attention|cross)\.backend)|tokenizer\.(add|chat_template)")
# of the data: what may be changed while the source stays
SAME_SOURCE = ("path", "batch_size", "micro_batch_size", "num_workers", "cache_dir")
# of the data: what a net was trained with, wherever the text is from
ROWS = ("packing", "row_length", *SAME_SOURCE[1:])
SPLITS = ("val", "test")  # of a run's own data, what may be measured
SPLITTING = ("data.val_path", "data.test_path", "data.val_fraction", "data.per_class")
WRITTEN = ("config.yaml", "tokenizer.json", "result.json", "environment.jsonl", "loss.png", "predictions.jsonl",
           "confusion.png", "checkpoints")  # each starts anew
LENGTHS = ("max_steps", "max_tokens", "max_epochs")


def finish(composed: DictConfig, settings: DictConfig, name: str = "train") -> DictConfig:
    """Check what Hydra composed for the command `name` under its own `settings`, and complete it."""
    OmegaConf.set_struct(composed, False)
    checks.check_words(composed, SCHEMAS[name])
    overrides = OmegaConf.to_container(settings.overrides.task)  # as they were typed, `${x}` and all
    checks.check_truths(overrides, SCHEMAS[name])
    checks.check_options(settings.runtime.choices)
    words = [word.lstrip("+~").partition("=")[0] for word in overrides]
    choices = settings.runtime.choices
    mode = settings.mode and settings.mode.name  # None of what is composed in Python
    if choices.get("sweep") and mode == "RUN":
        raise UserError(f"sweep={choices.sweep}: this is one run; add -m to make it a sweep")
    if name != "train" and not composed.ckpt:
        raise UserError("no ckpt: say ckpt=RUN (a checkpoint file, a run's folder, or last)")
    for word in ("ckpt", "init_from"):
        if composed.get(word) == "last" and not Path("last").exists():
            composed[word] = escaped(find("last"))  # one for all that follows
    if name == "generate":
        check_ranges(plain(composed))
        return composed
    if name == "evaluate" and composed.measure:
        return measures.completed(composed, words, choices)
    if name == "evaluate":
        config = measured(composed, words, choices)
    elif composed.ckpt is not None:
        if ranks.requeued() and (folder := run_folder(composed.ckpt)):  # not the file that the job began with
            composed.ckpt = escaped(str(folder))
        config = last_length_wins(resumed(composed, words, choices), words)
    else:
        config = started(composed, words, choices)
        if mode == "MULTIRUN":
            label = choices.model or choices.task
            config.run_dir = escaped(str(Path(settings.sweep.dir, f"{settings.job.num}-{label}")))
            if config.logger.wandb.group is None:
                config.logger.wandb.group = escaped(Path(settings.sweep.dir).name)
        elif config.run_dir is None:
            config.run_dir = fresh_folder(config.name)
        if ranks.requeued() and mode != "MULTIRUN" and Path(config.run_dir, "checkpoints", "MANIFEST.json").exists():
            composed.ckpt = escaped(config.run_dir)
            config = with_words(composed, [], choices)
    if name == "train":
        check_folder(config.run_dir)
        if config.ckpt is None:
            check_unused(config.run_dir)
    check(plain(config))
    if name == "train":
        check_effects(plain(config), words)
    if config.ckpt is not None:
        config.ckpt = escaped(find(config.ckpt))
    return config


def check(config: Mapping) -> None:
    """Refuse what a whole plain configuration can't mean, as far as that is known without importing any part of it."""
    mixing.check(config["data"])
    checks.check_parts(config)
    signatures.check(config)
    texts.check_sources(config["data"], config["task"])
    check_ranges(config)
    if (length := config["trainer"].get("max_time")) and not re.fullmatch(r"\d+(:\d\d){3}", length):
        raise UserError(f"trainer.max_time={length}: write DD:HH:MM:SS, as 00:08:00:00 for eight hours")
    if not (monitor := config["checkpoint"]["monitor"]).startswith("val/"):
        raise UserError(f"checkpoint.monitor={monitor}: give a metric of validation, as val/loss")


def check_folder(path: str) -> None:
    """Refuse a run's folder that can't be: a file, one below a file, where nothing may be written, or with a name that
    no disk takes."""
    if any(len(os.fsencode(name)) > 255 for name in Path(path).parts):
        raise UserError(f"run_dir={path[:60]}...: no name may be longer than 255 bytes; give a shorter one")
    place = next(place for place in (Path(path), *Path(path).parents) if place.exists())
    if not place.is_dir():
        raise UserError(f"run_dir={path}: {place} is a file; give another folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"run_dir={path}: nothing may be written in {place.absolute()}; give another folder")


def check_unused(path: str | Path) -> None:
    """Refuse a new run's folder that holds another run, or somebody's files that the run would write over."""
    if Path(path, "checkpoints", "MANIFEST.json").exists():
        raise UserError(f"run_dir={path} holds a run already: go on with it by ckpt={path}, or take another")
    found = [name for name in WRITTEN if Path(path, name).exists()]
    if found and not is_run(Path(path)):
        raise UserError(f"run_dir={path} holds {' and '.join(found)}, which no run has written and a run would write "
                        "over: give another folder, or move what is there")


def is_run(folder: Path) -> bool:
    """Whether the config.yaml of a folder is a run's."""
    try:
        content = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, Mapping) and {"run_dir", "task", "trainer", "checkpoint"} <= content.keys()


def started(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of a new run, from nothing or from the net of a checkpoint."""
    config = last_length_wins(typed, words)
    if choices.data == "mixture":
        mixing.complete(config.data)
    checks.drop_words(config, words)
    if config.adapter is not None:
        check_adapter(config)
    if config.init_from is not None:
        config = initialised(config, words)
    elif config.tokenizer.add:
        raise UserError("tokenizer.add: tokens are added to a checkpoint's vocabulary, init_from=RUN")
    elif choices.model is None:
        raise UserError(f"no model: say model=NAME (one of {', '.join(checks.groups()['model'])}) or init_from=RUN")
    checks.check_size(choices.model, choices["size"])
    checks.check_pair(choices.model, config.model, choices.task, config.task)
    if config.name is None:
        config.name = "-".join(filter(None, (choices.model, choices.task)))
    return config


def check_adapter(config: DictConfig) -> None:
    """Refuse an adapter without a base, and one that would leave untrained what is new in it."""
    checks.check_words(config.adapter, OmegaConf.structured(Adapter), "adapter.")
    if config.init_from is None:
        raise UserError("adapter=lora: an adapter is trained beside the weights of a checkpoint; say of which, "
                        "init_from=RUN")
    if config.tokenizer.add:
        raise UserError("tokenizer.add: an adapter leaves the embedding as it is, so that new tokens would never be "
                        "learned; leave one of the two out")


def fresh_folder(name: str) -> str:
    """runs/DATE/TIME-NAME, a folder that is not there yet; of a job of SLURM the same one each time."""
    now, name = datetime.now(), re.sub(r"[^\w.-]+", "-", name)
    path = ranks.job_folder(name) or Path("runs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}-{name}")
    if ranks.requeued():
        return str(path)
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
            raise UserError(f"{word}: ckpt={typed.ckpt} goes on with that run as it is; only trainer.*, logger.*, "
                            "checkpoint.* and trust may be given beside it (init_from= starts a new run)")
    return with_words(typed, words, choices)


def measured(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of the run that `ckpt` names, to be evaluated on what was typed, else on data of its own."""
    for word in words:
        if word.startswith("trainer.") and word.removeprefix("trainer.") not in EVALUATED:
            raise UserError(f"{word} changes nothing in an evaluation; of trainer.* it takes {', '.join(EVALUATED)}")
    others = [word for word in words if re.split(r"[./@]", word)[0] == "data"]
    elsewhere = {"data", "data.path"} & {*words}  # words that mean other text than the run's own
    if typed.split is not None and (elsewhere or typed.split not in SPLITS):
        raise UserError(f"split={typed.split}: " + ("other text is read whole; leave split out" if elsewhere else
                        f"it may be {' or '.join(SPLITS)}, of the data that the run has not learned from"))
    if whole := [word for word in others if "data" in words and word.startswith(SPLITTING)]:
        raise UserError(f"{whole[0]} changes nothing in an evaluation of data=..., which reads all of data.path")
    if "data" in words:  # another source: its words, but rows and steps as the net knows them
        config = with_words(typed, [word for word in words if word not in ("split", *others)], choices)
        kept = {word: literal(config.data[word]) for word in ROWS if f"data.{word}" not in words}
        config.data = OmegaConf.merge(typed.data, kept)
        if choices.data == "mixture":
            mixing.complete(config.data)
    else:
        for word in others:
            if word.removeprefix("data.") not in SAME_SOURCE:
                raise UserError(f"{word}: name the source that this word belongs to as well, data=NAME")
        config = with_words(typed, [word for word in words if word != "split"], choices)
        if elsewhere and config.data.split_column is not None:  # other text is read whole
            config.data.split_column = config.data.reader.split_column = None
    config.split = "whole" if elsewhere else typed.split
    if "trainer.limit_val_batches" not in words:
        config.trainer.limit_val_batches = None
    return config


def with_words(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The configuration of the run that `ckpt` names, with the values that `words` have in `typed`."""
    if (Path(typed.ckpt) / "config.json").is_file():
        raise UserError(f"ckpt={typed.ckpt} is an exported folder: it holds a net, but no task and no data. Start a "
                        f"run from it, train init_from={typed.ckpt}, or evaluate the likelihood of text, measure=NAME")
    ckpt = typed.ckpt if run_folder(typed.ckpt) else find(typed.ckpt)
    folder = run_folder(ckpt)  # wherever it has gone since
    config = stored(folder / "config.yaml" if folder and (folder / "config.yaml").exists() else Path(find(ckpt)))
    config = derived_again(config, typed)
    config.ckpt, config.trust = escaped(ckpt), typed.trust  # what a file says of its own trust is not believed
    config.run_dir = escaped(str(folder)) if folder else fresh_folder(config.name)
    for word in words:
        if word in checks.groups():  # trainer=ddp: the words of that file, not its defaults
            option = checks.content(f"{word}/{choices[word]}")
            own = {key: value for key, value in option.items() if key != "defaults"}
            OmegaConf.update(config, word, own, merge=True)
        elif word != "ckpt":
            OmegaConf.update(config, word, literal(plain(reduce(getitem, word.split("."), typed))), force_add=True)
    return config


def derived_again(config: DictConfig, typed: DictConfig) -> DictConfig:
    """`config` with its callbacks following the run's other words, as in `typed`, where they did when it was stored.

    A stored configuration has no interpolations: without this, a new `checkpoint.every_n_steps` would change nothing.
    """
    raw = OmegaConf.to_container(typed.callbacks, resolve=False) if "callbacks" in typed else {}
    again = OmegaConf.merge(config, {"callbacks": raw})
    for name, callback in raw.items():
        for word, value in callback.items() if name in config.callbacks else ():
            known, place = config.callbacks[name].get(word), "${run_dir}" in str(value)  # which a file can't move
            if place or "${" in str(value) and known == again.callbacks[name][word]:
                config.callbacks[name][word] = value
    return config


def check_unedited(config: Mapping, carried: Mapping, free: re.Pattern = FREE) -> None:
    """Refuse a plain `config`, or sections of one, that says of the run what the one `carried` by its checkpoint does
    not, but for the words that are `free`."""
    carried = OmegaConf.to_container(OmegaConf.merge(SCHEMAS["train"], restore(carried)), resolve=True)
    here, there = ({word: value for word, value in nodes(side) if not isinstance(value, Mapping | list)}
                   for side in (config, {word: carried.get(word) for word in config}))
    for word in here | there:
        if not free.fullmatch(word) and here.get(word) != there.get(word):
            raise UserError(f"config.yaml was edited: {word}={here.get(word)}, the checkpoint's run has "
                            f"{there.get(word)}; undo it (what a new run may change is given beside init_from=)")


def run_folder(ckpt: str) -> Path | None:
    """The run's folder that `ckpt` is, or is a checkpoint of; None where it is no such."""
    path = Path(ckpt)
    folder = next((place.parent for place in (path, path.parent) if place.name == "checkpoints"), path)
    return folder if (folder / "config.yaml").exists() or (folder / "checkpoints").is_dir() else None


def find(ckpt: str) -> str:
    """The checkpoint file that `ckpt` means."""
    from . import checkpoint

    return str(checkpoint.find(ckpt))


def stored(file: Path) -> DictConfig:
    """The configuration in a run's config.yaml or a checkpoint, held against the schema like one that is typed."""
    try:
        config = load(file) if file.suffix == ".yaml" else carried(file)
        checks.check_words(config, SCHEMAS["train"])
        config = OmegaConf.merge(SCHEMAS["train"], config)
        OmegaConf.set_struct(config, False)
        checks.check_parts(plain(config))
    except (UserError, OmegaConfBaseException) as error:
        advice = " (mend it, or remove it: each checkpoint holds a copy)" if file.suffix == ".yaml" else ""
        line = checks.explain(error)
        raise UserError(f"{'' if line.startswith(str(file)) else f'{file}: '}{line}{advice}") from None
    return config


def carried(file: Path) -> DictConfig:
    """The configuration in a checkpoint file."""
    from . import checkpoint

    return restore(checkpoint.identify(checkpoint.read(file), file)["config"])


def initialised(config: DictConfig, words: list[str]) -> DictConfig:
    """`config` with the net (and tokenizer) of the checkpoint that `init_from` names."""
    for word in words:
        if re.split(r"[./@]", word)[0] in ("model", "size", "tokenizer") and not NOT_THE_NET.fullmatch(word):
            own = f"; of the task's own head it is {word.replace('model', 'task', 1)}" * word.startswith("model.head.")
            raise UserError(f"{word}: leave it out: with init_from= the net and its tokenizer are the checkpoint's; "
                            "only dropout, the attention's backend and max_len may be changed, and tokenizer.add and "
                            f"tokenizer.chat_template given{own}")
    changes = {word: literal(plain(OmegaConf.select(config, word))) for word in words if NOT_THE_NET.fullmatch(word)}
    path = Path(config.init_from)
    if (path / "config.yaml").exists():  # a run folder tells its net without torch
        source = stored(path / "config.yaml")
        source = {"model": source.model, "tokenizer": source.tokenizer}
    elif path.exists():
        from . import load as load_net

        net = load_net(config.init_from, tuple(config.trust))
        source = {"model": literal(net.config), "tokenizer": {"vocab_size": net.vocab_size}}
    else:
        raise UserError(f"init_from={path} does not exist: give a checkpoint file, a run folder or an exported folder")
    config.model = source["model"]
    for word, value in source["tokenizer"].items():
        config.tokenizer[word] = literal(value)
    config.tokenizer.add, config.tokenizer.chat_template = [], None  # what that run has is in its tokenizer
    longest, position = config.model.max_len, OmegaConf.select(config, "model.position._target_")
    if position == "lmzoo.blocks.position.Learned" and changes.get("model.max_len", longest) != longest:
        raise UserError(f"model.max_len: the checkpoint has learned {longest} positions, no more and no fewer; "
                        "leave it out, and give data.row_length for shorter rows")
    for word, value in changes.items():
        OmegaConf.update(config, word, value)
    return config
