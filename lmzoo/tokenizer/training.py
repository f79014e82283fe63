"""Training a tokenizer: one function a kind, and `prepare`, which does what a config says.

The same documents give the same file in every process: where a trainer of the library leaves ids or the last digits of
scores to chance, the order is set here.

- `train_bpe`: byte-level byte-pair encoding, as GPT-2 (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019)
- `train_wordpiece`: whole words and `##` continuations, as BERT (Wu et al. 2016, arXiv:1609.08144)
- `train_unigram`: the unigram language model, as T5 (Kudo 2018, arXiv:1804.10959), with bytes for unseen characters
- `char`: one token a character of the documents, with bytes for unseen ones
- `byte`: one token a UTF-8 byte, as ByT5 (Xue et al. 2021, arXiv:2105.13626); nothing is trained

All but WordPiece (lower case, white space) and Unigram's single white space give back exactly the text they were given,
in any language.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from ..errors import UserError
from .wrapper import IDEOGRAPHS, Tokenizer, load

N_SENTINELS = 100
# GPT-2's pattern: a word, a number or a run of signs, each with the one space before it. It never leaves "<" and a
# letter in one piece, so that no piece can spell <pad>, <extra_id_0> or <0x41>.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
IDEOGRAPH = re.compile(f"[{IDEOGRAPHS}]")


def _finish(tokenizer: tokenizers.Tokenizer, specials: Iterable[str]) -> Tokenizer:
    """Mark the special tokens (added at the end where the model does not hold them) and wrap."""
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return Tokenizer(tokenizer.to_str())


def _room(vocab_size: int, needed: int, what: str) -> int:
    if vocab_size <= needed:
        raise UserError(f"tokenizer.vocab_size={vocab_size} leaves no room: {what} take {needed}")
    return vocab_size - needed


def _characters(documents: Iterable[str]) -> list[str]:
    """The characters of the documents, the most frequent first; ties by code point."""
    counts: Counter[str] = Counter()
    for text in documents:
        counts.update(text)
    return sorted(counts, key=lambda character: (-counts[character], character))


def _sentinels(n: int) -> list[str]:
    return [f"<extra_id_{i}>" for i in range(n)]


def _bytes() -> list[str]:
    return [f"<0x{i:02X}>" for i in range(256)]


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's one special token: <|endoftext|> (id 0) opens and closes documents and pads rows."""
    special = ["<|endoftext|>"]
    _room(vocab_size, 256 + len(special), "256 bytes and <|endoftext|>")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
    return _finish(tokenizer, special)


def train_wordpiece(documents: Iterable[str], vocab_size: int, lowercase: bool = True) -> Tokenizer:
    """BERT's WordPiece: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4, then letters, their ## forms, then merges.

    The merges are those of byte-pair encoding over words that begin with a mark ("_word"), which then becomes the
    absence of "##". (The library's own trainer numbers ## forms by the order of a hash table.) At most half of the
    vocabulary is single characters, so that Chinese leaves room for words of other scripts.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    room = _room(vocab_size, len(special) + 1, "the special tokens") + 1
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace(prepend_scheme="always", split=False)])
    documents = list(documents)
    normal = (tokenizer.normalizer.normalize_str(text) for text in documents)
    letters = sorted(letter for letter in _characters(normal)[:room // 2] if not letter.isspace())
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size + len(letters), initial_alphabet=["▁", *letters], limit_alphabet=len(letters) + 1,
        show_progress=False))
    inner = [f"##{letter}" for letter in letters if letter.isalnum() and not IDEOGRAPH.match(letter)]
    merged = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) if len(token) > 1]
    merged = [token[1:] if token.startswith("▁") else f"##{token}" for token in merged]
    vocabulary = list(dict.fromkeys([*special, *letters, *inner, *merged]))[:vocab_size]
    tokenizer.model = models.WordPiece({token: id for id, token in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wide = f"[{IDEOGRAPHS}\u3000-\u303f\uff00-\uffef]"  # no space between two Chinese characters or their punctuation
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(), decoders.Fuse(), decoders.Replace(Regex(f"(?<={wide}) (?={wide})"), "")])
    return _finish(tokenizer, special)


def train_unigram(documents: Iterable[str], vocab_size: int, sentinels: int = N_SENTINELS,
                  whitespace: Literal["single", "kept"] = "single") -> Tokenizer:
    """T5's Unigram: <pad> </s> <unk> are ids 0 to 2, then the 256 bytes, the pieces by probability, <extra_id_0> ...

    A character without a piece is spelled in bytes, so <unk> never occurs. As in SentencePiece every run of white space
    becomes a `single` space, which begins the word after it; `kept`, it stays as it is, so that decoding is exact.
    """
    special = ["<pad>", "</s>", "<unk>"]
    room = _room(vocab_size, len(special) + 256 + sentinels, f"256 bytes, 3 special tokens and {sentinels} sentinels")
    trained = tokenizers.Tokenizer(models.Unigram())
    if whitespace == "single":
        trained.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    documents = list(documents)
    rare = dict.fromkeys(map(ord, _characters(documents)[room // 2:]))
    trained.train_from_iterator((text.translate(rare) for text in documents), trainers.UnigramTrainer(
        vocab_size=room + 1, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False))
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"] if piece != "<unk>"]
    # Letters that training had pruned come back at the bottom, 0.0001 apart in the order of a hash table: level them.
    bottom = min((score for _, score in pieces), default=0.0)
    bottom_end = bottom + 1e-4 * sum(len(piece) == 1 for piece, _ in pieces)
    pieces = [(piece, bottom if len(piece) == 1 and score < bottom_end else score) for piece, score in pieces]
    pieces = sorted(((piece, round(score, 6)) for piece, score in pieces), key=lambda item: (-item[1], item[0]))[:room]
    vocabulary = [(name, 0.0) for name in [*special, *_bytes()]] + pieces
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=True))
    if trained.normalizer:
        tokenizer.normalizer = trained.normalizer
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _finish(tokenizer, special + _sentinels(sentinels))


def char(documents: Iterable[str], vocab_size: int, sentinels: int = N_SENTINELS) -> Tokenizer:
    """Every character of the documents is a token, the most frequent first; others are spelled in UTF-8 bytes."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *_sentinels(sentinels)]
    room = _room(vocab_size, len(special) + 256, f"256 bytes and {len(special)} special tokens")
    vocabulary = [*special, *_bytes(), *_characters(documents)[:room]]
    tokenizer = tokenizers.Tokenizer(models.BPE(
        {token: id for id, token in enumerate(vocabulary)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _finish(tokenizer, special)


def byte(documents: Iterable[str], vocab_size: int, sentinels: int = N_SENTINELS) -> Tokenizer:
    """The 256 bytes of UTF-8; the documents are not read."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *_sentinels(sentinels)]
    _room(vocab_size, len(special) + 255, f"256 bytes and {len(special)} special tokens")
    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: id for id, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, special)


def sample(documents: Iterable[str], megabytes: float) -> Iterator[str]:
    """The first `megabytes` of UTF-8 of the documents; the one that goes beyond is cut."""
    left = int(megabytes * 1e6)
    for text in documents:
        size = len(text.encode())
        yield text if size <= left else text.encode()[:left].decode(errors="ignore")
        left -= size
        if left <= 0:
            return


class Measure(NamedTuple):
    """What a tokenizer makes of some text: its UTF-8 bytes, the tokens, and how many of these are unk."""

    n_bytes: int
    n_tokens: int
    n_unknown: int

    def __str__(self) -> str:
        n_tokens = max(1, self.n_tokens)
        return f"{self.n_bytes / n_tokens:.2f} bytes per token, {self.n_unknown / n_tokens:.3%} unknown"


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Measure:
    """Encode texts one after the other, and count."""
    counts = Counter()
    for text in texts:
        ids = tokenizer.encode(text)
        counts.update(n_bytes=len(text.encode()), n_tokens=len(ids), n_unknown=ids.count(tokenizer.unk))
    return Measure(*(counts[name] for name in Measure._fields))


def prepare(config: Mapping, documents: Iterable[str]) -> Tokenizer:
    """The tokenizer of a node `tokenizer`: the one at its `path`, else its `kind` trained on `documents`.

    Reads `sample_mb` megabytes at most; what `special` names is in it, whatever the kind. Raises `UserError` if it
    holds more tokens than `vocab_size`, the model's size.
    """
    if config.get("path"):
        tokenizer = load(config["path"], config.get("special"))
    else:
        from hydra.utils import instantiate

        kind: Callable[..., Tokenizer] = instantiate(config["kind"])
        special = config.get("special") or {}
        trained = kind(sample(documents, config["sample_mb"]), vocab_size=config["vocab_size"] - len(special))
        marked = _finish(tokenizers.Tokenizer.from_str(trained.json), special.values())
        tokenizer = Tokenizer(marked.json, special)
    if len(tokenizer) > config["vocab_size"]:
        where = f"tokenizer.path={config['path']}" if config.get("path") else "the tokenizer"
        raise UserError(f"{where} holds {len(tokenizer)} tokens, more than tokenizer.vocab_size={config['vocab_size']} "
                        f"of the model: set tokenizer.vocab_size={len(tokenizer)}")
    return tokenizer
