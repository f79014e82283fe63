"""The configuration of an evaluation by a measure (`conf/measure/`): it needs a net, of a run or of an exported folder,
and text, but neither task nor trainer. Without torch."""

import re
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from . import checks, mixing, runs, signatures, texts
from .errors import UserError
from .literal import plain, restore
from .ranges import check_ranges

ROWS = ("packing", "row_length", "batch_size", "micro_batch_size", "num_workers")  # of the data: what tasks train on
OWN = ("path", "cache_dir", "processes")  # of a run's own data: what may be changed


def completed(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """What was typed beside `measure`, with the data of the run that `ckpt` names where no other is.

    It carries the `words` that were typed, and as `other` whether the data is any other text than the run's own.
    """
    if not isinstance(typed.measure.get("_target_"), str):
        raise UserError(f"measure: say measure=NAME, one of {', '.join(checks.groups()['measure'])}")
    for word in words:
        section, _, name = re.sub("[/@]", ".", word).partition(".")
        if section == "trainer" and name != "accelerator":
            raise UserError(f"{word} changes nothing in a measure; of trainer.* it takes accelerator")
        if section == "data" and name in ROWS:
            more = ": say measure.batch_size" if name.endswith("batch_size") else ""
            raise UserError(f"{word} changes nothing in a measure, which makes rows of its own{more}")
    data = own_data(typed, words, choices) if choices.data is None else typed.data
    if choices.data == "mixture":
        mixing.complete(data)
    data.row_length = 1  # that of no net
    accelerator = typed.trainer.accelerator if "trainer.accelerator" in words else "auto"
    config = {"ckpt": typed.ckpt, "trust": plain(typed.trust), "split": typed.split, "measure": plain(typed.measure),
              "data": {word: value for word, value in plain(data).items() if word not in ROWS},
              "trainer": {"accelerator": accelerator},
              "words": words, "other": bool({"data", "data.path"} & {*words})}  # fmt: skip
    mixing.check(config["data"])
    checks.check_parts(config)
    signatures.check(config)
    texts.check_sources(config["data"], task=None)
    check_ranges(config)
    return restore(config)


def own_data(typed: DictConfig, words: list[str], choices: Mapping) -> DictConfig:
    """The data of a run, which may lie elsewhere by now, or be another text of its kind."""
    if (Path(typed.ckpt) / "config.json").is_file():
        raise UserError(f"ckpt={typed.ckpt} is an exported folder, which has no data of its own: say what to measure "
                        "it on, as data=text data.path=FILE")
    given = [word for word in words if re.split(r"[./@]", word)[0] == "data"]
    for word in given:
        if word.removeprefix("data.") not in OWN:
            raise UserError(f"{word}: name the source that this word belongs to as well, data=NAME")
    run = runs.with_words(typed, given, choices)
    if run.task.get("labels") == "turns" and "data.path" not in words:
        raise UserError(f"ckpt={typed.ckpt} has learned from conversations, and this measure reads texts: say which, "
                        "as data=text data.path=FILE")
    return run.data
