"""Words that are typed and would change nothing, since another word of the run decides: each is refused with the one
that does, for a run that ignores a wish looks like one that has granted it."""

import re
from collections.abc import Mapping, Sequence
from functools import reduce

from .checks import sources
from .errors import UserError

MAYBE = ("lmzoo.data.tables.Hub", "lmzoo.data.tables.Saved")  # which may hold texts for validation themselves
SPLIT = ("lmzoo.data.pydoc.read_docstrings", "lmzoo.data.exercises.read_exercise")  # which do


def check_effects(config: Mapping, typed: Sequence[str]) -> None:
    """Refuse the first of the `typed` words that changes nothing in the run of a whole plain configuration."""
    for word in typed:
        for words, reason in RULES:
            if re.fullmatch(words, word) and (why := reason(config, word)):
                raise UserError(f"{word}: {why}")


def of(config: Mapping, word: str):
    """The value of a dotted word, None where there is none."""
    return reduce(lambda node, key: node.get(key) if isinstance(node, Mapping) else None, word.split("."), config)


def sharded(config: Mapping, word: str) -> str:
    if not of(config, word) or config["trainer"]["strategy"] == "fsdp":
        return ""
    return "only ranks with shares of the weights write folders of them; say trainer=fsdp too, or leave it out"


def val_fraction(config: Mapping, word: str) -> str:
    """Of all sources, or of the one whose word it is."""
    own = [source for place, source in sources(config["data"]) if f"{place}.".startswith(
        word.removesuffix("val_fraction"))]  # fmt: skip
    if all(source["reader"]["_target_"] in SPLIT for source in own):
        return "this source says itself which of its texts are for validation; leave it out"
    if not all(source.get("val_path") for source in own):
        return ""
    return "nothing is held out where val_path names the text for validation; leave one of them out"


def tokenizer(config: Mapping, word: str) -> str:
    if path := config["tokenizer"]["path"]:
        return f"the tokenizer is that of tokenizer.path={path}, as it is; leave one of them out"
    if word.endswith("sample_mb") and config["tokenizer"]["kind"]["_target_"].endswith(".byte"):
        return "tokenizer=byte learns from no text; leave it out"
    return ""


def fraction(config: Mapping, word: str) -> str:
    steps = word.replace("fraction", "steps")
    if (given := of(config, steps)) is None:
        return ""
    return f"{steps}={given} takes its place; leave one of them out (or say {steps}=null)"


def group_by_length(config: Mapping, word: str) -> str:
    if config["task"].get("labels") and not config["data"].get("sources"):
        return ""
    return "only a task that reads a text, a pair or a conversation a row has rows of many lengths; leave it out"


def softmax(config: Mapping, word: str) -> str:
    """z_loss needs one softmax over the classes, label smoothing any."""
    labels = config["task"].get("labels")
    if not of(config, word) or labels != "number" and (labels, word) != ("classes", "task.z_loss"):
        return ""
    return f"with task.labels={labels} there is no softmax over classes that it could act on; leave it out"


def n_kv_heads(config: Mapping, word: str) -> str:
    """A part that groups its heads itself takes no other number."""
    net, given = config["model"], of(config, word)
    for part in net["attention"] if isinstance(net["attention"], list) else [net["attention"]]:
        group = part.get("group") or net["n_heads"]
        if given is not None and part["_target_"].endswith(".GroupedQuery") and given * group != net["n_heads"]:
            return (f"n_kv_heads={given} contradicts n_heads={net['n_heads']} / model.attention.group={group}; "
                    "leave it out")
    return ""


def validation(config: Mapping, word: str) -> str:
    if not of(config, word) or any(
            source.get("val_path") or source["val_fraction"] or source.get("split_column")
            or source["reader"]["_target_"] in MAYBE + SPLIT for _, source in sources(config["data"])):
        return ""
    return "there is no validation (data.val_fraction=0 and no data.val_path); give one of these, or leave it out"


def watch(config: Mapping, word: str) -> str:
    wandb = config["logger"]["wandb"]
    if of(config, word) and wandb["mode"] == "disabled":
        return "logger.wandb.mode=disabled keeps no histograms; leave it out, or take mode=offline"
    return "" if wandb["watch"] else "no histograms are asked for: say logger.wandb.watch=all too, or leave it out"


RULES = [
    (r"checkpoint\.sharded", sharded),
    (r"data\.(sources\.\w+\.)?val_fraction", val_fraction),
    (r"data\.group_by_length", group_by_length),
    (r"tokenizer(\.kind\..*|\.sample_mb)?", tokenizer),
    (r"schedule\.\w+_fraction", fraction),
    (r"task\.(z_loss|label_smoothing)", softmax),
    (r"model\.n_kv_heads", n_kv_heads),
    (r"checkpoint\.(monitor|keep_best|test_best)|trainer\.(limit_val_batches|val_before_training|patience)",
     validation),
    (r"logger\.wandb\.watch(_every_n_steps)?", watch),
]
