"""What Hydra lets pass or says at length: words that `+` brought in, a task that does not fit the model; and every
error of composing as one line that names the word and the nearest right one."""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from .errors import UserError
from .ranges import nodes
from .signatures import CONF, definition, nearest, parameters
from .sweep import cut

TYPES = {"Float": "a number", "Integer": "a whole number", "bool": "true or false"}
EXTRAS = {"hydra/sweeper/optuna": "optuna", "hydra/launcher/joblib": "joblib",  # Hydra's plugins
          "hydra/launcher/submitit_local": "submitit", "hydra/launcher/submitit_slurm": "submitit"}
INNER = {"hydra", "published", "recipe"}  # what a user has no need to type
OPTIONS = ("-h -c -p -r -m -i -sc -cp -cn -cd --help --hydra-help --version --cfg --resolve --package --run --multirun "
           "--shell-completion --config-path --config-name --config-dir --experimental-rerun --info").split()  # Hydra's
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
NAMING = re.compile(r"ckpt|init_from|run_dir|name|cache_dir|\w*path|\w*(field|column|separator)")  # never an empty text
NO_OPTION = re.compile(r"(?i)null|true|false|nan|[-+]?(inf|\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[\[{].*|")  # of any group
OF_TEXTS = ("Classifier", "Tagger", "Pooler")  # heads that tell of texts or words, not which token stands where
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
            found = nearest(word, known) if path else anywhere(word, schema, known)
            raise UserError(f"{path}{word}: there is no such word{found}")
        child, node = schema._get_node(word), config._get_node(word)
        if isinstance(child, DictConfig) and len(child):
            if not isinstance(node, DictConfig):
                raise UserError(f"{path}{word}={node} should be words with values")
            check_words(node, child, f"{path}{word}.")


def check_parts(config: Mapping) -> None:
    """Refuse what is no part where one belongs, as null or a number: a part has a `_target_`, or is a list of such.

    And first no size of the vocabulary, which the net's part would be blamed for.
    """
    if config.get("tokenizer", {"vocab_size": 2}).get("vocab_size") is None:
        raise UserError("tokenizer.vocab_size=None should be a whole number")
    for place, node in parts(config):
        nodes = node if isinstance(node, list) and node and place.startswith("model.") else [node]
        if not all(isinstance(one, Mapping) and isinstance(one.get("_target_"), str) for one in nodes):
            if isinstance(node, Mapping) and node and "_target_" not in node:
                raise UserError(f"{place}.{next(iter(node))}: nothing is chosen here that has this word")
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
    for place, word in enumerate(words):
        group, equals, option = word.partition("=")
        if re.fullmatch(r"--?[A-Za-z].*", group) and group not in OPTIONS:
            value = option or next((value for value in words[place + 1 : place + 2] if value[:1] != "-"), "VALUE")
            raise UserError(f"{word}: write words as {group.lstrip('-')}={value}")
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
        if net_family in tasks.get(task, ()):  # it is the task's head that is not for it
            raise UserError(f"the task/head that is chosen needs a model of family {' or '.join(wanted)}, but "
                            f"{model or 'the net of init_from'} is of family {net_family}: models for it are "
                            f"{', '.join(models)}")
        raise UserError(
            f"task={task} needs a model of family {' or '.join(wanted)}, but {model or 'the net of init_from'} is of "
            f"family {net_family}: tasks for it are {fitting}; models for {task} are {', '.join(models)}"
        )
    head = str(net["head"].get("_target_")).rpartition(".")[2] if isinstance(net.get("head"), Mapping) else None
    if head in OF_TEXTS and "head" not in settings:
        origin = "choose another by model/head=NAME" if model else "start from the one that it was fine-tuned from"
        raise UserError(f"task={task} needs a head over the vocabulary, and {model or 'the net of init_from'} ends in "
                        f"a {head}: {origin}")


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
    if word == "task/head":
        tasks = [name for name in groups()["task"] if "\n  - head: " in read(f"task/{name}")]
        return f"{word}: the task has no such choice; there it is with task={', '.join(tasks)}"
    if word in groups():
        return (f"{word}: nothing is chosen whose part this could be, as model=NAME; "
                "with ckpt= or init_from= the parts are the checkpoint's")
    first, at_root = word.partition(".")[0], isinstance(parent, DictConfig) and parent._get_parent() is None
    if first not in words and ("." not in word or at_root):
        return f"{word}: there is no such word{anywhere(first, parent, {*words, *groups()} - INNER)}"
    wrong = getattr(cause, "key", None) or word.rpartition(".")[2]  # `source` of data.source.wiki.path
    return f"{word}: there is no such word{nearest(str(wrong), words)}"


def anywhere(word: str, config: object, beside: Iterable[str]) -> str:
    """`; did you mean optim.lr?` for `lr`, which a configuration has elsewhere; else what is nearest beside it."""
    content = OmegaConf.to_container(config) if isinstance(config, DictConfig) else {}
    inside = [place for place, _ in nodes({key: node for key, node in content.items() if key not in INNER})]
    found = sorted(place for place in inside if place.rpartition(".")[2] == word)
    return f"; did you mean {' or '.join(found)}?" if found and word not in beside else nearest(word, beside)


def one_line(error: Exception) -> str:
    noise = re.compile(r"$|full_key|object_type|reference_type|See https")
    line = "; ".join(line.strip() for line in str(error).splitlines() if not noise.match(line.strip()))
    line = line.replace("Cannot merge DictConfig with ListConfig", "words with values belong here, not a list")
    return re.sub(r"field '.*' is not Optional", "null is no value for it", line)
