"""From files to training rows: a token stream that is a pure function of (corpus, tokenizer, settings, seed, step).

    corpus, pydoc    readers: a path becomes a stream of documents, in constant memory
    preparation      documents become a token store, once, on disk, under a name that is a hash of all that went in
    shards           the store: memory-mapped tokens, document borders, byte counts, labels
    packing          what a row of the store is
    sampler          which rows an optimizer step reads: a permutation computed on the fly
    loader           rows become batches; an item of the train loader is an optimizer step
    datamodule       the loaders of a run, for Lightning
"""

from importlib import import_module

_HOMES = {"Document": "corpus", "DataModule": "datamodule", "Loader": "loader", "Store": "shards",
          "documents": "preparation",
          "prepare": "preparation", "prepare_tokenizer": "preparation"}
__all__ = ["DataModule", "Document", "Loader", "Store", "documents", "prepare", "prepare_tokenizer"]


def __getattr__(name: str):
    """Import a name's file when it is first asked for: torch and Lightning only where they are needed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
