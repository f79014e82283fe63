"""What Hydra lets pass or says at length: words that `+` brought in, a task that does not fit the model; and every
error of composing as one line that names the word and the nearest right one."""

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from . import literal
from .errors import UserError
from .signatures import definition, misfit, nearest, parameters
from .sweep import cut

CONF = Path(str(files("lmzoo.conf")))
TYPES = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
EXTRAS = {"hydra/sweeper/optuna": "optuna", "hydra/launcher/joblib": "joblib",  # Hydra's plugins
          "hydra/launcher/submitit_local": "submitit", "hydra/launcher/submitit_slurm": "submitit"}
INNER = {"hydra", "published", "recipe"}  # what a user has no need to type
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
NAMING = re.compile(r"ckpt|init_from|run_dir|name|cache_dir|\w*path|\w*(field|column|separator)")  # never an empty text
NO_OPTION = re.compile(r"(?i)null|true|false|nan|[-+]?(inf|\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[\[{].*|")  # of any group
LABELS = (None, "class", "classes", "number", "tags", "text")  # what a task may want, see lmzoo/data/labelled.py
LOOKED_AT = {  # by tasks that want such labels
    "text_column": LABELS[:4] + LABELS[5:], "field": LABELS[:4] + LABELS[5:], "label_column": LABELS[:4],
    "pair_column": LABELS[1:4], "label_separator": ("classes",), "words_column": ("tags",), "tags_column": ("tags",),
    "target_column": ("text",), "template": LABELS[1:4] + ("text",),
}  # fmt: skip
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
        child, node = schema._get_node(word), config._get_node(word)
        if isinstance(child, DictConfig) and len(child):
            if not isinstance(node, DictConfig):
                raise UserError(f"{path}{word}={node} should be words with values")
            check_words(node, child, f"{path}{word}.")


def check_parts(config: Mapping) -> None:
    """Refuse what is no part where one belongs, as null or a number: a part has a `_target_`, or is a list of such."""
    for place, node in parts(config):
        nodes = node if isinstance(node, list) and node and place.startswith("model.") else [node]
        if not all(isinstance(one, Mapping) and isinstance(one.get("_target_"), str) for one in nodes):
            given = f"._target_={node.get('_target_')!r}" if isinstance(node, Mapping) else f"={node!r}"
            group = next(name for name in (place.replace(".", "/"), place.partition(".")[0]) if name in groups())
            raise UserError(f"{place}{given} is no part: choose by {group}=NAME, one of {', '.join(groups()[group])}")


def parts(config: Mapping) -> Iterator[tuple[str, object]]:
    """(place, node) wherever a configuration, or some of its sections, has a part; those inside a part follow it."""
    yield from ((word, config[word]) for word in ("model", "task", "schedule") if word in config)
    kinds = [group.partition("/")[2] for group in groups() if group.startswith("model/")]
    inner = [("model", kinds), ("task", ["head"]), ("tokenizer", ["kind"]), ("optim", ["optimizer"])]
    yield from ((f"{section}.{word}", config[section][word]) for section, words in inner if section in config
                for word in words if word in config[section])
    yield from ((f"{place}.reader", source["reader"]) for place, source in sources(config.get("data", {}))
                if "data" in config)
    callbacks = config.get("callbacks", {})
    callbacks = callbacks if isinstance(callbacks, Mapping) else {"": callbacks}
    yield from ((f"callbacks.{name}".rstrip("."), node) for name, node in callbacks.items())


def sources(data: Mapping) -> Iterator[tuple[str, Mapping]]:
    """(place, node) of each source of a mixture; of any other data, themselves."""
    named = data.get("sources") or {}
    return ((f"data.sources.{name}", source) for name, source in named.items()) if named else iter([("data", data)])


def drop_words(config: DictConfig, typed: Sequence[str]) -> None:
    """Where PART._target_= names another class on the command line, leave out those words of the part's file that this
    one does not take; what was typed stays, and is refused later where it doesn't fit."""
    for place in (word.removesuffix("._target_") for word in typed if word.endswith("._target_")):
        node = OmegaConf.select(config, place)
        module, _, name = str(node["_target_"]).rpartition(".")
        found = definition(module, name) if module else None
        known = found and parameters(*found)
        for word in list(node) if known is not None else ():
            if not word.startswith("_") and word not in known and f"{place}.{word}" not in typed:
                del node[word]


def check_source(data: Mapping) -> None:
    """Refuse a word of the data that its reader would not look at, naming the sources that take it."""
    reader = data["reader"]
    if data.get("name") is not None and data.get("path") is not None:
        raise UserError(f"data.name={data['name']} and data.path={data['path']}: give one of them")
    for word in ("name", "config", *LOOKED_AT):
        if data.get(word) is not None and word not in reader:
            taking = [name for name in groups()["data"] if f"${{..{word}}}" in read(f"data/{name}")]
            raise UserError(f"data.{word}: {reader['_target_'].rpartition('.')[2]} has no such word; it is one of "
                            f"{', '.join(f'data={name}' for name in taking)}")
    if (template := data.get("template")) is not None and template.count("{}") != 1:
        raise UserError(f"data.template={template!r} has no place, or more than one, for the text: write {{}} once")
    if len(delimiter := str(reader.get("delimiter", ","))) != 1:
        raise UserError(f"data.reader.delimiter={delimiter!r} is not a single character (tabs: call the file .tsv)")
    for place, path in paths(data):
        library = reader["_target_"].startswith("lmzoo.data.pydoc.") and path
        if library and not (isinstance(library, str) and any(Path(library).expanduser().glob("*.py"))):
            raise UserError(f"{place}={library}: say which kind of source it is, data=text (or jsonl, csv) "
                            f"{place}={library}; the documentation of Python is read from a folder of its library")


def check_labels(task: Mapping, data: Mapping) -> None:
    """Refuse labels that are none, and a word of the data that no task with such labels looks at."""
    if (labels := task.get("labels")) not in LABELS:
        raise UserError(f"task.labels={labels}: there are no such labels{nearest(str(labels), LABELS[1:])}")
    for word, kinds in LOOKED_AT.items():
        if data.get(word) is not None and labels not in kinds:
            raise UserError(f"data.{word}: the task does not look at it (its labels are {labels or 'none'}); a task of "
                            f"labels {' or '.join(filter(None, kinds))} does")


def paths(data: Mapping) -> Iterator[tuple[str, str | list[str] | None]]:
    """(place, path) of all text that the data names. Refuses a set whose name no metric can hold, or without a path."""
    for word in ("path", "val_path", "test_path"):
        if not isinstance(sets := data.get(word), Mapping):
            yield f"data.{word}", sets
            continue
        for name, path in sets.items():
            literal.check_name(f"data.{word}.{name}", str(name))
            if not path or misfit(path, "str | list[str]"):
                raise UserError(f"data.{word}.{name}={path!r} should be a path or a list of them")
            yield f"data.{word}.{name}", path


def check_truths(words: Sequence[str], schema: DictConfig) -> None:
    """Refuse a number where true or false belongs: OmegaConf takes any but 0 for true."""
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        node = schema
        for part in key.split("."):
            node = node._get_node(part) if isinstance(node, DictConfig) and part in list(node) else None
        if isinstance(node, BooleanNode) and value.lower() not in ("true", "false"):
            raise UserError(f"{word} should be true or false")


def check_options(choices: Mapping) -> None:
    """Refuse a file that only holds what its neighbours share."""
    for group, option in choices.items():
        if str(option).startswith("_") and group in groups():
            raise UserError(f"{group}={option}: there is no such option{nearest(option, groups()[group])}")


def check_typed(words: Sequence[str]) -> None:
    """Refuse a word that is typed without what it needs, and a group that follows from the others."""
    for word in words:
        group, equals, option = word.partition("=")
        if not group:
            raise UserError(f"{word}: write word=value")
        if group.startswith("hydra.run."):
            raise UserError(f"{word}: a run's folder is run_dir=")
        if equals and not option and NAMING.fullmatch(re.split(r"[./]", group.lstrip("+"))[-1]):
            raise UserError(f"{word}: nothing follows the sign; give a value, or leave the word out")
        chosen = any(other.startswith(("adapter=", "experiment=")) for other in words)
        if group.lstrip("+~").startswith("adapter.") and not chosen:
            raise UserError(f"{word}: no adapter is chosen whose word this could be: say adapter=lora as well")
        if group in ("published", "recipe"):
            raise UserError(f"{word}: this follows from model=, task= and size=; choose by those")
        if equals and group in groups() and NO_OPTION.fullmatch(option):
            raise UserError(f"{word}: there is no such option{nearest(option, groups()[group])}")


def check_size(model: str | None, size: str) -> None:
    """Refuse a size that is neither on the generic ladder nor published for the model."""
    sizes = {*groups()["size"], *published().get(model, ())}
    if size not in sizes:
        raise UserError(f"size={size}: there is no such size of {model}{nearest(size, sizes)}")


def published() -> dict[str, list[str]]:
    """{model: the sizes that a paper published}."""
    found: dict[str, list[str]] = {}
    for model, _, size in (name.rpartition("-") for name in groups()["published"]):
        found.setdefault(model, []).append(size)
    return found


def check_pair(model: str | None, net: Mapping, task: str | None, settings: Mapping) -> None:
    """Refuse a task that is not for the family of the net, naming what fits either."""
    if (net_family := family(net)) is None:  # somebody else's class: its task will tell
        return
    tasks = {name: task_families(name) for name in groups()["task"]}
    fitting = ", ".join(name for name, families in tasks.items() if net_family in families) or "none yet"
    if task is None:
        raise UserError(f"no task: say task=NAME (for {model or 'this net'}: {fitting})")
    wanted = as_list(settings.get("family", list(FAMILIES.values())))
    if not {*wanted} <= {*FAMILIES.values()}:
        raise UserError(f"task.family={settings.family} should be one of {', '.join(FAMILIES.values())}, or a list")
    if net_family not in wanted:
        models = [name for name in groups()["model"] if model_family(name) in wanted]
        raise UserError(
            f"task={task} needs a model of family {' or '.join(wanted)}, but {model or 'the net of init_from'} is of "
            f"family {net_family}: tasks for it are {fitting}; models for {task} are {', '.join(models)}"
        )


def family(net: Mapping) -> str | None:
    """encoder, decoder or encoder-decoder, by the `_target_` of a net's configuration; None for anybody else's."""
    return FAMILIES.get(str(net.get("_target_")).rpartition(".")[2])


def read(name: str) -> str:
    """The text of `conf/NAME.yaml`."""
    return (CONF / f"{name}.yaml").read_text(encoding="utf-8")


def content(name: str) -> dict:
    """The words and values of `conf/NAME.yaml`."""
    return yaml.safe_load(read(name))


def inherited(group: str, name: str, word: str) -> object:
    """The value of a word in `conf/GROUP/NAME.yaml`, or in the file of the group that it starts from; None without."""
    words = content(f"{group}/{name}")
    bases = [entry for entry in words.get("defaults", ()) if entry in groups()[group]]
    return inherited(group, bases[0], word) if bases and word not in words else words.get(word)


def task_families(name: str) -> list[str]:
    """The families that `conf/task/NAME.yaml` is for: all of them where it does not say."""
    return as_list(inherited("task", name, "family") or list(FAMILIES.values()))


def model_family(name: str) -> str | None:
    """The family of `conf/model/NAME.yaml`, by its `_target_` or that of the file that it starts from."""
    return family({"_target_": inherited("model", name, "_target_")})


def as_list(value) -> list:
    return list(value) if isinstance(value, list | ListConfig) else [value]


# --- errors in one line

def explain(error: Exception) -> str:
    """One line for an error of Hydra, OmegaConf, the disk or ours: what is wrong, where, and the nearest right word."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        full = error.errno in FULL
        advice = "make room, or allow larger files" if full else "is the path right, and may you read and write it?"
        return f"{cut(str(error.filename), 100)}: {error.strerror} ({advice})"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if extra := EXTRAS.get(error.missing_cfg_file):
            return f"{group}={option} needs a package more: pip install 'lmzoo[{extra}]'"
        options = groups().get(group) or [place.rpartition("/")[2] for place in EXTRAS if place.startswith(group)]
        return f"{group}={option}: there is no such option{nearest(option, options)}"
    if isinstance(error, OverrideParseException):
        reason = one_line(error) if "=" in error.override else "write word=value"
        return f"can't read {error.override!r}: {reason}"
    if found := re.match(r"Could not delete from config. '(\S+)' does not exist", str(error)):
        return f"~{found[1]}: there is no such word"
    if found := re.match(r"Could not append to config. An item is already at '(\S+)'", str(error)):
        return f"{found[1]} is there already: write {found[1]}=VALUE, without the +"
    if "is not a ListConfig" in str(cause) and cause.full_key:
        return f"{cause.full_key} should be a list: {cause.full_key}=[one, another]"
    if isinstance(cause, ValidationError):
        phrase = r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)"
        found = re.match(phrase, str(cause), re.DOTALL)
        return f"{cause.full_key}" + (f"={found[1]!r} should be {TYPES[found[2]]}" if found else f": {one_line(cause)}")
    if found := re.match(r"Ambiguous value for argument '(\w.*)'", str(error)):
        return f"{found[1]}: several values make a sweep: add -m (a list is written [a,b], a text in quotes)"
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
    wrong = getattr(cause, "key", None) or word.rpartition(".")[2]  # `source` of data.source.wiki.path
    return f"{word}: there is no such word{nearest(str(wrong), words)}"


def one_line(error: Exception) -> str:
    noise = re.compile(r"$|full_key|object_type|reference_type|See https")
    line = "; ".join(line.strip() for line in str(error).splitlines() if not noise.match(line.strip()))
    line = line.replace("Cannot merge DictConfig with ListConfig", "words with values belong here, not a list")
    return re.sub(r"field '.*' is not Optional", "null is no value for it", line)
