"""From files to training rows: a token stream that is a pure function of (corpus, tokenizer, settings, seed, step).

    corpus, tables, pydoc   readers: a path becomes a stream of documents, in constant memory
    exercises        pairs of texts made up by a rule
    labelled         a document and its label, and which columns of a row they come from
    opening          files and their text, decompressed and decoded
    sources          what is read, in which parts, and the split of each document
    preparation      documents become a token store, once, on disk, under a name that is a hash of all that went in
    bar              how far that is
    workers          processes that tokenise parts of a source
    duplicates       which documents repeat an earlier text
    shards           the store: memory-mapped tokens, document borders, byte counts, labels of any kind
    shardfile        one file of it
    cache            where all that lies; its locks
    few              so many documents of each class
    unknown          how much of a text the tokenizer does not know
    packing          what a row of the store is
    fitting          packing whole documents: best fit decreasing
    sampler          which rows an optimizer step reads: a permutation computed on the fly
    mixture          several sources as one, by weights
    loader           rows become batches; an item of the train loader is an optimizer step
    datamodule       the loaders of a run, for Lightning
"""

from importlib import import_module

_HOMES = {"DataModule": "datamodule", "Store": "shards", "prepare": "mixture", "prepare_tokenizer": "mixture",
          "store_name": "mixture"}
__all__ = ["DataModule", "Store", "prepare", "prepare_tokenizer", "store_name"]


def __getattr__(name: str):
    """Import a name's file when it is first asked for: torch and Lightning only where they are needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
