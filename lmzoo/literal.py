"""Text that stays as it was typed: through Hydra's grammar, OmegaConf's interpolations and a run folder's YAML.

Hydra's grammar refuses commas, apostrophes, brackets and Chinese, and OmegaConf reads `${x}` as an interpolation. So
the values of free text and paths are quoted before either sees them, and escaped where a configuration is read again.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from .errors import UserError, naming

NEVER_NULL = ("tags", "trust", "add")  # lists, where none are given empty ones
LISTS = re.compile(rf"({'|'.join(NEVER_NULL)}|stop|\w*path)")
FREE_TEXT = re.compile(rf"{LISTS.pattern}|prompt|text|ckpt|init_from|run_dir|notes|name|cache_dir|delimiter|\w*template"
                       r"|\w*(field|column|separator)")
FREE_THERE = re.compile(  # words that mean more elsewhere
    r"logger\.wandb\.(project|group)|tokenizer\.special\.\w+|measure\.between|(measure|task)\.words(\.\w+)?"
)
SET = re.compile(r"(?:.*[./])?((?:val|test)_path)\.(.*)")  # one of several, by its name
NAME = re.compile(r"(?!loss$)[A-Za-z_][A-Za-z0-9_-]{,63}")
ITEM = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")  # of a list; in quotes it may hold commas
UNWRITABLE = re.compile("[\0\x85\ud800-\udfff]")  # half a character, what no path holds, what YAML makes a space
NULLABLE = re.compile(r"(?!prompt$|text$)")


def prepared(words: Sequence[str]) -> list[str]:
    """The words of a command line, ready for Hydra's grammar."""
    sweep = {"-m", "--multirun"} & set(words)
    for word in words:
        if word.startswith("~") and not word.startswith("~callbacks."):
            raise UserError(f"{word}: only a callback can be taken away (~callbacks.NAME); give the word another value")
        if UNWRITABLE.search(word):
            raise UserError(f"{word!r} is no text that a run can note (of UTF-8, without \\x00 and \\x85); change it")
    words = [quote(word) for word in words]
    return [re.sub("^run_dir=", "hydra.sweep.dir=", word) if sweep else word for word in words]  # one for each job


def quote(word: str) -> str:
    """A word of the command line with the value of a free text or path in Hydra's quotes: `prompt="it's"` is literal.

    `null` stays null where it means "none given"; `data.path`, `tags` and `trust` take a list `[a, 'b, c']`.
    """
    key, equals, value = word.partition("=")
    last = re.split(r"[./]", key.lstrip("+"))[-1]
    if of_set := SET.fullmatch(key):
        check_name(key, of_set[2])
        key, last = f"++{key.lstrip('+')}", of_set[1]  # which is one path, or none, until it has sets
    free = FREE_TEXT.fullmatch(last) or FREE_THERE.fullmatch(key.lstrip("+"))
    if not equals or key.lstrip("+").startswith("hydra") or not free:
        return word
    if value == "null" and NULLABLE.match(last):
        return f"{key}={'[]' if last in NEVER_NULL else 'null'}"
    if LISTS.fullmatch(last) and value[:1] == "[" and value[-1:] == "]" and not os.path.exists(value):
        items = (item[1] or item[2] or item[3] for item in ITEM.finditer(value[1:-1]))
        return f"{key}=[{','.join(map(quoted, filter(None, items)))}]"
    if last in NEVER_NULL:
        return f"{key}=[{','.join(quoted(tag.strip()) for tag in value.split(',') if tag.strip())}]"
    return f"{key}={quoted(value)}"


def check_name(place: str, name: str) -> None:
    """Refuse what can't be the NAME in that of a metric, `val/NAME/loss`."""
    if not NAME.fullmatch(name):
        raise UserError(f"{place}: {name!r} would stand in val/NAME/loss: begin a name with a letter, then letters, "
                        "digits, _ and - (and not loss)")


def quoted(text: str) -> str:
    """`text` in Hydra's double quotes: backslashes count only before a quote, where they double."""
    return '"' + re.sub(r'(\\*)("|$(?![\n]))', lambda m: m[1] * 2 + (r"\"" if m[2] else ""), escaped(text)) + '"'


def escaped(text: str) -> str:
    """`text` as OmegaConf has to hold it, so that `${x}` and `???` (no value yet) are read as these characters."""
    if text == "???":
        return "??${oc.decode:?}"
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", text)


def plain(config):
    """A configuration as plain Python types, everything resolved; what is one already comes back as it is.

    Raises OmegaConf's errors for a value that is missing or refers to what isn't there.
    """
    if not OmegaConf.is_config(config):
        return config
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def literal(node):
    """Plain types as OmegaConf has to hold them, so that no text in them is read as an interpolation."""
    if isinstance(node, Mapping):
        return {key: literal(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [literal(child) for child in node]
    return escaped(node) if isinstance(node, str) else node


def restore(container: Mapping) -> DictConfig:
    """A configuration from plain types, the inverse of `plain`."""
    return OmegaConf.create(literal(container))


def load(path: str | Path) -> DictConfig:
    """The configuration that `save` wrote; UserError for what is no mapping in YAML."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        raise UserError(f"{path}: this is no YAML" + (f" (line {line + 1})" if line is not None else "")) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: {'it is empty' if content is None else 'words with values belong here'}")
    return restore(content)


def save(config: DictConfig, path: str | Path) -> None:
    """Write the resolved configuration as YAML, in one move."""
    write(path, yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))


def write(path: str | Path, text: str | Iterable[str]) -> None:
    """Write a text file, or its pieces, in one move: at any moment, a kill's too, it is whole or not there."""
    beside = Path(f"{path}.tmp")
    with naming(path), beside.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
    os.replace(beside, path)
