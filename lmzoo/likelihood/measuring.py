"""What stands between a configuration and a measure: whether they and a net go together, and the text it reads."""

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from .. import data
from ..checks import OF_TEXTS, sources
from ..data.labelled import Document
from ..data.sources import Source
from ..errors import UserError
from ..texts import LOOKED_AT, check_labels
from .labels import Labelled

JSONL = "lmzoo.data.corpus.Jsonl"
UNREAD = {  # words of data that is not the run's own at which a measure that reads such text does not look
    "documents": ("val_path", "test_path"), "records": (*LOOKED_AT, "val_path", "test_path"),
    "labelled": ("pair_column", "sources"),
}  # fmt: skip
SPLITS = {"documents": ("val", "test"), "records": (), "labelled": ("val", "test", "whole")}


def check_net(measure, net: nn.Module) -> None:
    """Refuse a net that a measure is not for."""
    name, head = type(measure).__name__, type(net.head).__name__
    if net.family not in measure.families:
        raise UserError(f"{name} is for nets of family {' or '.join(measure.families)}, and this one is of family "
                        f"{net.family}: take another measure=NAME")
    if head in OF_TEXTS:
        raise UserError(f"{name} needs a head over the vocabulary, and this net ends in a {head}: measure the net that "
                        "it was fine-tuned from, or leave measure out")
    if not hasattr(net, "tokenizer"):
        raise UserError(f"{name} reads text, and the folder of this net holds no tokenizer: save one into it")
    if hasattr(measure, "check"):
        measure.check(net)


def check_data(measure, config: Mapping) -> None:
    """Refuse data that a measure does not read, and words that would change nothing."""
    node, split, reads = config["data"], config["split"], measure.reads
    if reads == "records" and node["reader"].get("_target_") != JSONL:
        raise UserError("this measure reads questions in JSON lines: say data=jsonl data.path=FILE")
    if split is not None and (split not in SPLITS[reads] or reads == "documents" and config["other"]):
        others = SPLITS[reads] and not config["other"] or reads == "labelled"
        raise UserError(f"split={split}: " + (f"it may be {' or '.join(SPLITS[reads])}" if others else
                                              "all of data.path is read; leave split out"))
    for word in UNREAD[reads] if config["other"] else ():
        if node.get(word):
            raise UserError(f"data.{word} changes nothing in this measure: leave it out")
    for _, source in sources(node) if config["other"] and reads != "records" else ():
        check_labels({"labels": "class" if reads == "labelled" else None}, source)


def read(measure, config: Mapping, tokenizer) -> tuple[str, object]:
    """The split that is measured, and what a measure is called with: see the head of this package."""
    node, split = config["data"], config["split"]
    whole = split == "whole"
    if measure.reads == "records":
        return "test", node["path"]
    if measure.reads == "documents":
        store = data.prepare({"data": node}, tokenizer, split="test" if config["other"] else None)
        split = "test" if config["other"] else chosen(split, store.splits)
        return split, store[split]
    source = Source(node, "class")

    def documents(split: str) -> Iterator[Document]:
        found = source.documents(split="test" if whole else None)
        return (document for name, document in found if name.partition("/")[0] == split)

    split = "test" if whole else chosen(split, dict.fromkeys(name.partition("/")[0] for name, _ in source.documents()))
    return split, Labelled(lambda: documents(split), lambda: documents("train"))


def chosen(split: str | None, splits: Collection[str]) -> str:
    """The split that is asked for, else "test" where there is one, else "val"; UserError where it is not there."""
    split = split or ("test" if "test" in splits else "val")
    if split not in splits:
        raise UserError(f"split={split}: the data has {' and '.join(splits)}; give others by data.path=")
    return split
