"""Stores of a few documents, written without a source."""

from lmzoo.data.labelled import Document, names_in
from lmzoo.data.shardfile import ShardWriter
from lmzoo.data.shards import SPLITS, Store, write_meta
from lmzoo.tokenizer import byte

TOKENIZER = byte((), 512, sentinels=0)  # bos is 1, eos 2


class Writer:
    """Writes a store into `folder`: `add` documents, part after part (`cut` begins the next), then `finish`."""

    def __init__(self, folder, tokenizer, words=False, kind=None):
        self.folder, self.tokenizer, self.words, self.kind = folder, tokenizer, words, kind
        self.shards, self.open = {}, {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, split, encoded, texts, labels, more=None):
        self.add_documents(split, encoded, [
            Document(text, label, more=goes_on)
            for text, label, goes_on in zip(texts, labels, more or [False] * len(texts), strict=True)])

    def add_documents(self, split, encoded, documents):
        if split not in self.open:
            file = self.folder / f"{split}-{len(self.shards.get(split, ())):05}.shard"
            self.open[split] = ShardWriter(file, self.tokenizer, self.words, self.kind)
        self.open[split].add(encoded, documents)

    def cut(self):
        for split, writer in self.open.items():
            self.shards.setdefault(split, []).append(writer.close())
        self.open = {}

    def finish(self, labels=None, xz_bits_per_byte=None):
        self.cut()
        found = {label for shards in self.shards.values() for one in shards for label in one["labels"]}
        known = labels or sorted({name for label in found for name in names_in(label, self.kind)})
        splits = {split: self.shards[split] for split in SPLITS if split in self.shards}
        write_meta(self.folder / "meta.json", {
            "tokenizer": self.tokenizer.hash, "words": self.words, "kind": self.kind, "labels": known,
            "splits": splits, "xz_bits_per_byte": xz_bits_per_byte,
            "left_out": {"documents": 0, "bytes": 0}, "megabytes_per_second": None})
        return Store(self.folder)


def write_store(folder, documents, words=False, n_shards=1, text="?", labels=None, xz=None, tokenizer=TOKENIZER):
    """A store of {split: documents}, each its ids without bos and eos, in which only the first begins a word.

    Each split is cut into `n_shards` shards; every document is said to be of `text`, and `labels` are those of "train".
    """
    writer = Writer(folder, tokenizer, words)
    for part in range(n_shards):
        for split, given in documents.items():
            own = range(len(given) * part // n_shards, len(given) * (part + 1) // n_shards)
            encoded = [(given[i], [place == 0 for place in range(len(given[i]))]) for i in own]
            classes = [labels[i] if labels and split == "train" else None for i in own]
            if encoded:
                writer.add(split, encoded, [text] * len(own), classes)
        writer.cut()
    return writer.finish(None, xz)


def settings(folder, target="lmzoo.data.corpus.Text", reader=None, **data):
    """A configuration of what preparation reads; the cache is in `folder`."""
    paths = {"path": None, "val_path": None, "test_path": None, "cache_dir": str(folder / "cache"), "processes": 1}
    data = paths | {"val_fraction": 0.1} | data
    reader = {"_target_": target, "_partial_": "." in target and target.rpartition(".")[2].islower()} | (
        {"split": "line"} if reader is None else reader)
    kind = {"_target_": "lmzoo.tokenizer.char", "_partial_": True}
    return {"data": data | {"reader": reader}, "tokenizer": {"kind": kind, "vocab_size": 512, "sample_mb": 64}}


def texts(store, tokenizer):
    """The documents of a store by split."""
    return {name: [tokenizer.decode(store[name].read(*store[name].span(i))) for i in range(store[name].n_documents)]
            for name in store.splits}
