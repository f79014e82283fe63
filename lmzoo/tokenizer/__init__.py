"""Tokenizers: five ways to cut text into ids, and one wrapper that knows which id plays which role.

Every tokenizer here is a `tokenizers.Tokenizer` (Hugging Face's Rust library, one JSON file), so a file from elsewhere
works the same.

    chat        conversations as texts, by chat templates
    wrapper     `Tokenizer`: text to ids and back, and the ids of the roles that tasks need; `load` opens a file
    training    a function for each kind (bpe, wordpiece, unigram, char, byte), and `prepare`, which reads a config
"""

from .training import byte, char, measure, prepare, sample, train_bpe, train_unigram, train_wordpiece
from .wrapper import WORD, Tokenizer, load

__all__ = ["WORD", "Tokenizer", "byte", "char", "load", "measure", "prepare", "sample", "train_bpe", "train_unigram",
           "train_wordpiece"]
