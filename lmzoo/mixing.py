"""The sources of a mixture (`data=mixture`): from the few words of each to a whole `data` node that says what it reads.

    data=mixture data.sources.wiki.path='wiki/*.txt' data.sources.wiki.weight=7 data.sources.code.kind=jsonl \\
        data.sources.code.path=code.jsonl data.sources.code.field=source data.sources.code.weight=3
"""

import math
from collections.abc import Mapping
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import checks
from .errors import UserError
from .literal import check_name
from .schema import Data, Source
from .signatures import nearest

WORDS = [field.name for field in fields(Source)]
OF_ALL = [field.name for field in fields(Data) if field.name not in (*WORDS, "sources")]  # words of the whole mixture
SHARED = ("val_fraction", "deduplicate")  # of the mixture too: what its sources do unless they say otherwise
BLOCK = 1024  # rows in which each source has its share: none may have less than one of them


def complete(data: DictConfig) -> None:
    """Make each of the sources of a mixture's `data` node whole. Raises UserError for what is missing or misspelt."""
    if not data.sources:
        raise UserError("data=mixture has no sources: give each a share and a text, as data.sources.wiki.weight=0.7 "
                        "data.sources.wiki.path='wiki/*.txt'")
    if not isinstance(data.sources, DictConfig):
        raise UserError(f"data.sources={data.sources}: give each source a name, as data.sources.wiki.path='wiki/*.txt'")
    given = {name: node.get("weight") for name, node in data.sources.items() if isinstance(node, DictConfig)}
    check_weights({name: float(weight) for name, weight in given.items() if isinstance(weight, int | float)})
    for name in list(data.sources):
        data.sources[name] = whole(name, data.sources[name], {word: data[word] for word in SHARED})
    check_weights({name: source.weight for name, source in data.sources.items()})


def check(data: Mapping) -> None:
    """Refuse words of a plain `data` node that are a mixture's where it is none, or a text's where it is one."""
    if data.get("sources") and data["reader"]:
        raise UserError("data.sources: only a mixture has sources, data=mixture")
    if data.get("sources") and data.get("per_class") is not None:
        raise UserError("data.per_class: a mixture is read by its weights; take the texts of one source")
    for word in WORDS if data.get("sources") else ():
        if word not in SHARED and data.get(word) is not None:
            raise UserError(f"data.{word}: the text of a mixture is that of its sources, data.sources.NAME.{word}")


def whole(name: str, given: object, shared: Mapping) -> DictConfig:
    """A source's words, those of the kind that it is of, and those that the mixture's sources share."""
    place = f"data.sources.{name}"
    if not isinstance(given, DictConfig):
        raise UserError(f"{place}={given}: a source has words of its own, {place}.path= and {place}.weight=")
    check_name(place, str(name))
    for word in given:
        if word in OF_ALL:
            raise UserError(f"{place}.{word}: this is one for all sources, data.{word}")
        if word not in WORDS:
            raise UserError(f"{place}.{word}: there is no such word{nearest(str(word), WORDS)}")
    if given.get("weight") is None:
        raise UserError(f"{place} has no weight: say which share of the rows is its, {place}.weight=0.5")
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Source), given)
    except OmegaConfBaseException as error:
        raise UserError(f"{place}.{checks.explain(error)}") from None
    kinds = [kind for kind in checks.groups()["data"] if kind != "mixture"]
    if typed.kind not in kinds:
        raise UserError(f"{place}.kind={typed.kind}: there is no such kind{nearest(typed.kind, kinds)}")
    option = [OmegaConf.load(checks.CONF / "data" / f"{file}.yaml") for file in ("_rows", typed.kind)]
    words = {word: typed._get_node(word) for word in typed if not OmegaConf.is_missing(typed, word)}
    merged = OmegaConf.merge(*option, shared, words)
    return OmegaConf.create({word: merged._get_node(word) for word in WORDS})


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that are no shares, or that leave a source without a row in a block."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"data.sources.{name}.weight={weight} must be a number above 0")
    total = math.fsum(weights.values())
    for name, weight in weights.items():
        if weight * BLOCK < total:
            raise UserError(f"data.sources.{name}.weight={weight:g} of {total:g} is less than one row in {BLOCK}: "
                            "leave the source out, or give it more")

