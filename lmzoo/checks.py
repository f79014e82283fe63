"""What Hydra lets pass or says at length: words that `+` brought in, a task that does not fit the model; and every
error of composing as one line that names the word and the nearest right one."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from .errors import UserError
from .signatures import nearest

CONF = Path(str(files("lmzoo.conf")))
TYPES = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
INNER = {"hydra", "published", "recipe"}  # what a user has no need to type
FAMILIES = {"Encoder": "encoder", "Decoder": "decoder", "EncoderDecoder": "encoder-decoder"}


@cache
def groups() -> dict[str, list[str]]:
    """Every group of `conf/` and its options: {"model": ["bert", "gpt", ...], "model/position": [...], ...}.

    A file whose name begins with _ is what its neighbours share, not an option.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(CONF.rglob("[!_]*.yaml")):
        found.setdefault(file.parent.relative_to(CONF).as_posix(), []).append(file.stem)
    del found["."]
    return found


def check_words(config: DictConfig, schema: DictConfig, path: str = "") -> None:
    """Refuse a word that the schema doesn't have: `+` lets it into any mapping."""
    known = list(schema)
    for word in config if known else ():  # an empty mapping is open: its words are those of its _target_
        if word not in known:
            raise UserError(f"{path}{word}: there is no such word{nearest(word, known)}")
        child = schema._get_node(word)
        if isinstance(child, DictConfig) and OmegaConf.is_dict(config._get_node(word)):
            check_words(config._get_node(word), child, f"{path}{word}.")


def check_options(choices: Mapping) -> None:
    """Refuse a file that only holds what its neighbours share."""
    for group, option in choices.items():
        if str(option).startswith("_") and group in groups():
            raise UserError(f"{group}={option}: there is no such option{nearest(option, groups()[group])}")


def check_typed(words: Sequence[str]) -> None:
    """Refuse a group that is typed without an option, or that follows from the others."""
    for word in words:
        group, equals, option = word.partition("=")
        if group in ("published", "recipe"):
            raise UserError(f"{word}: this follows from model=, task= and size=; choose by those")
        if equals and group in groups() and (option in ("", "null") or option.isdigit()):
            raise UserError(f"{word}: there is no such option{nearest(option, groups()[group])}")


def check_size(model: str | None, size: str) -> None:
    """Refuse a size that is neither on the generic ladder nor published for the model."""
    published = [name.removeprefix(f"{model}-") for name in groups()["published"] if name.startswith(f"{model}-")]
    if size not in groups()["size"] + published:
        raise UserError(f"size={size}: there is no such size of {model}{nearest(size, groups()['size'] + published)}")


def check_pair(model: str | None, net: Mapping, task: str | None, settings: Mapping) -> None:
    """Refuse a task that is not for the family of the net, naming what fits either."""
    if (net_family := family(net)) is None:  # somebody else's class: its task will tell
        return
    tasks = {name: task_families(CONF / "task" / f"{name}.yaml") for name in groups()["task"]}
    fitting = ", ".join(name for name, families in tasks.items() if net_family in families) or "none yet"
    if task is None:
        raise UserError(f"no task: say task=NAME (for {model or 'this net'}: {fitting})")
    wanted = as_list(settings.get("family", list(FAMILIES.values())))
    if net_family not in wanted:
        models = [name for name in groups()["model"] if model_family(name) in wanted]
        raise UserError(
            f"task={task} needs a model of family {' or '.join(wanted)}, but {model or 'the net of init_from'} is of "
            f"family {net_family}: tasks for it are {fitting}; models for {task} are {', '.join(models)}"
        )


def family(net: Mapping) -> str | None:
    """encoder, decoder or encoder-decoder, by the `_target_` of a net's configuration; None for anybody else's."""
    return FAMILIES.get(net.get("_target_", "").rpartition(".")[2])


def task_families(file: Path) -> list[str]:
    return as_list(yaml.safe_load(file.read_text(encoding="utf-8"))["family"])


def model_family(name: str) -> str | None:
    """The family of `conf/model/NAME.yaml`, by its `_target_` or that of the file that it starts from."""
    content = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    if "_target_" in content:
        return family(content)
    bases = [entry for entry in content.get("defaults", ()) if isinstance(entry, str) and entry in groups()["model"]]
    return model_family(bases[0]) if bases else None


def as_list(value) -> list:
    return [value] if isinstance(value, str) else list(value)


# --- errors in one line

def explain(error: Exception) -> str:
    """One line for an error of Hydra, OmegaConf or ours: what is wrong, where, and the nearest right word."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such option{nearest(option, groups().get(group, []))}"
    if isinstance(error, OverrideParseException):
        reason = one_line(error) if "=" in error.override else "write word=value"
        return f"can't read {error.override!r}: {reason}"
    if isinstance(cause, ValidationError):
        phrase = r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)"
        found = re.match(phrase, str(cause), re.DOTALL)
        return f"{cause.full_key}" + (f"={found[1]!r} should be {TYPES[found[2]]}" if found else f": {one_line(cause)}")
    if isinstance(cause, ConfigKeyError) or "Could not override" in str(error):
        return misspelt(error, cause)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {one_line(cause)}"
    return one_line(error)


def misspelt(error: Exception, cause: Exception) -> str:
    """For a word that is not there: the nearest word beside it, or the nearest group."""
    quoted = re.search(r"Could not override '([^']+)'", str(error))
    word = quoted[1] if quoted else cause.full_key
    parent = getattr(cause, "parent_node", None)
    words = list(parent) if isinstance(parent, DictConfig) else []
    if word in groups():
        return (f"{word}: nothing is chosen whose part this could be, as model=NAME; "
                "with ckpt= or init_from= the parts are the checkpoint's")
    first, at_root = word.partition(".")[0], isinstance(parent, DictConfig) and parent._get_parent() is None
    if first not in words and ("." not in word or at_root):
        return f"{word}: there is no such word{nearest(first, {*words, *groups()} - INNER)}"
    return f"{word}: there is no such word{nearest(word.rpartition('.')[2], words)}"


def one_line(error: Exception) -> str:
    noise = re.compile(r"$|full_key|object_type|reference_type|See https")
    return "; ".join(line.strip() for line in str(error).splitlines() if not noise.match(line.strip()))
