"""What stands between a configuration and a measure: whether they and a net go together, and the text it reads."""

import logging
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from .. import data
from ..checks import OF_TEXTS
from ..data.labelled import Document, whole_texts
from ..data.sources import Source
from ..errors import UserError
from ..texts import LOOKED_AT
from .labels import Labelled

log = logging.getLogger(__name__)
JSONL = "lmzoo.data.corpus.Jsonl"
UNREAD = {  # words of the data at which a measure does not look, by what it reads
    "documents": ("val_path", "test_path", "val_fraction", *(w for w, of in LOOKED_AT.items() if None not in of)),
    "records": ("val_path", "test_path", "val_fraction", "deduplicate", *LOOKED_AT),
    "labelled": ("sources", "deduplicate", "pair_column", "per_class",
                 *(w for w, of in LOOKED_AT.items() if "class" not in of)),
}
SPLITS = {"documents": ("val", "test"), "records": (), "labelled": ("val", "test", "whole")}


def check_net(measure, net: nn.Module) -> None:
    """Refuse a net that a measure is not for."""
    (room, _, name), head = type(measure).__module__.rpartition("."), type(net.head).__name__
    name = f"measure={name}" if room == __package__ else type(measure).__name__
    if net.family not in measure.families:
        raise UserError(f"{name} is for nets of family {' or '.join(measure.families)}, and this one is of family "
                        f"{net.family}: take another measure=NAME")
    if head in OF_TEXTS:
        raise UserError(f"{name} needs a head over the vocabulary, and this net ends in a {head}: measure the net that "
                        "it was fine-tuned from, or leave measure out")
    if hasattr(measure, "check"):
        measure.check(net)


def check_data(measure, config: Mapping) -> None:
    """Refuse data that a measure does not read, and words that would change nothing."""
    reads, split = measure.reads, config["split"]
    if reads == "records" and config["data"]["reader"].get("_target_") != JSONL:
        raise UserError("this measure reads questions in JSON lines: say data=jsonl data.path=FILE")
    splits = () if reads == "documents" and config["other"] else SPLITS[reads]
    if split is not None and split not in splits:
        known = f"it may be {' or '.join(splits)}" if splits else "all of data.path is read; leave split out"
        raise UserError(f"split={split}: {known}")
    for word in config["words"]:
        section, _, name = word.partition(".")
        if section == "data" and name.partition(".")[0] in UNREAD[reads]:
            raise UserError(f"{word} changes nothing in this measure: leave it out")


def read(measure, config: Mapping, tokenizer) -> tuple[str, object]:
    """The split that is measured, and what a measure is called with: see the head of this package."""
    node, split, other = config["data"], config["split"], config["other"]
    if measure.reads == "records":
        return "test", node["path"]
    if measure.reads == "documents":
        store = data.prepare({"data": node}, tokenizer, split="test" if other else None)
        split = "test" if other else chosen(split, store.splits)
        if not store[split].n_bytes:
            raise UserError(f"all documents of {split} are empty: there is nothing to measure")
        if unknown := n_unknown(store[split], tokenizer.unk):
            log.warning("%s of the %s tokens of %s stand for signs or words that the tokenizer does not know, whatever "
                        "they are: they count as easier than they are", f"{unknown:,}",
                        f"{store[split].n_tokens:,}", split)
        return split, store[split]
    source, whole = Source(node, "class"), "test" if split == "whole" else None

    def documents(split: str) -> Iterator[Document]:
        return whole_texts(document for name, document in source.documents(split=whole)
                           if name.partition("/")[0] == split)  # fmt: skip

    split = whole or chosen(split, dict.fromkeys(name.partition("/")[0] for name, _ in source.documents()))
    return split, Labelled(lambda: documents(split), lambda: documents("train"))


def n_unknown(split, unk: int | None) -> int:
    """How many tokens of a split of a store are `unk`."""
    spans = map(split.span, range(split.n_documents)) if unk is not None else ()
    return sum(int((split.read(*span) == unk).sum()) for span in spans)


def chosen(split: str | None, splits: Collection[str]) -> str:
    """The split that is asked for, else "test" where there is one, else "val"; UserError where it is not there."""
    split = split or ("test" if "test" in splits else "val")
    if split not in splits:
        raise UserError(f"split={split}: the data has {' and '.join(splits)}; give others by data.path=")
    return split
