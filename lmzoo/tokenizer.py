"""Tokenizers: five ways to cut text into ids, and one wrapper that knows which id plays which role.

Every tokenizer here is a `tokenizers.Tokenizer` (Hugging Face's Rust library, one JSON file), so a file from elsewhere
works the same. The same documents give the same file in every process: where a trainer of the library leaves ids or the
last digits of scores to chance, the order is set here.

- `train_bpe`: byte-level byte-pair encoding, as GPT-2 (Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019)
- `train_wordpiece`: whole words and `##` continuations, as BERT (Wu et al. 2016, arXiv:1609.08144)
- `train_unigram`: the unigram language model, as T5 (Kudo 2018, arXiv:1804.10959), with bytes for unseen characters
- `char`: one token a character of the documents, with bytes for unseen ones
- `byte`: one token a UTF-8 byte, as ByT5 (Xue et al. 2021, arXiv:2105.13626); nothing is trained

All but WordPiece (lower case, white space) give back exactly the text they were given, in any language.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from .errors import UserError

N_SENTINELS = 100
# The usual spellings of each role, the likeliest first.
ROLES = {
    "bos": ("[CLS]", "<s>", "<|endoftext|>", "<bos>", "<|begin_of_text|>"),
    "eos": ("[SEP]", "</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "mask": ("[MASK]", "<mask>"),
}
NAMES = ROLES | {"start": ROLES["bos"] + ROLES["pad"], "sentinels": ("<extra_id_0>",)}
EVERY_KIND = "bpe, wordpiece, unigram, char, byte"
KINDS = {  # which of our kinds have a role: for the error message
    "bos": "bpe, wordpiece, char, byte", "eos": EVERY_KIND, "pad": EVERY_KIND, "start": EVERY_KIND,
    "unk": "wordpiece, unigram, char, byte", "mask": "wordpiece, char, byte", "sentinels": "unigram, char, byte",
}
# GPT-2's pattern: a word, a number or a run of signs, each with the one space before it. It never leaves "<" and a
# letter in one piece, so that no piece can spell <pad>, <extra_id_0> or <0x41>.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Chinese characters and kana: signs that are written without spaces and count as a word each
IDEOGRAPHS = "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
IDEOGRAPH = re.compile(f"[{IDEOGRAPHS}]")
# A word with the white space before it: an ideograph, a run of letters and digits, or a single sign
WORD = re.compile(rf"\s*(?:[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s])|\s+$")


class Tokenizer:
    """Text to ids and back, and the ids of the roles that tasks need.

    `json` is the library's JSON; `special` names the tokens of roles that have unusual names, as {"pad": "<fill>"}.
    `pad, bos, eos, unk, mask, start` are ids or None, `sentinels` the ids of <extra_id_0>, <extra_id_1>, ...
    Without a token for padding `pad` is `eos` (GPT); `start`, with which a decoder begins, is `bos`, else `pad` (T5).
    """

    def __init__(self, json: str, special: Mapping[str, str] | None = None):
        self._tokenizer = tokenizers.Tokenizer.from_str(json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.special = dict(special or {})
        self.json = self._tokenizer.to_str()
        self.hash = hashlib.sha256(repr((self.json, sorted(self.special.items()))).encode()).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(vocabulary.values(), default=-1) + 1
        for role, name in self.special.items():
            if role not in ROLES:
                raise UserError(f"tokenizer.special.{role} is not a role; the roles are {', '.join(ROLES)}")
            if name not in vocabulary:
                raise UserError(f"tokenizer.special.{role}={name!r} is not a token of this tokenizer")
        usual = {role: next((name for name in names if name in vocabulary), None) for role, names in ROLES.items()}
        ids = {role: vocabulary.get(self.special.get(role, name)) for role, name in usual.items()}
        self.bos, self.eos, self.unk, self.mask = ids["bos"], ids["eos"], ids["unk"], ids["mask"]
        self.pad = self.eos if ids["pad"] is None else ids["pad"]
        self.start = self.pad if self.bos is None else self.bos
        self.sentinels = []
        while (sentinel := vocabulary.get(f"<extra_id_{len(self.sentinels)}>")) is not None:
            self.sentinels.append(sentinel)
        marked = (id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        self.special_ids = {*marked, *self.sentinels, *(id for id in ids.values() if id is not None)}
        names = sorted(map(re.escape, map(self.token, self.special_ids)), key=len, reverse=True)
        self._special_names = re.compile("|".join(names) or r"(?!)")

    def __len__(self) -> int:
        """The number of ids: one more than the largest, so that it is a safe size for an embedding."""
        return self._size

    def __reduce__(self):
        return Tokenizer, (self.json, self.special)

    def token(self, id: int) -> str:
        """The token of an id as the vocabulary spells it; "" for an id without one."""
        return self._tokenizer.id_to_token(id) or ""

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text: nothing is added, and no special token is read out of it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        return [ids for ids, _ in self._encode(texts)]

    def encode_words(self, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
        """For each text its ids, and for each id whether a word begins there.

        A word is a run of letters and digits, a single other sign, or one Chinese or Japanese character; white space
        belongs to the word after it. This is read from the text, so it is the same notion for every tokenizer.
        """
        result = []
        for text, (ids, offsets) in zip(texts, self._encode(texts), strict=True):
            word_of, ends = [], [match.end() for match in WORD.finditer(text)]
            for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                word_of += [number] * (end - begin)
            words = [word_of[min(begin, len(word_of) - 1)] for begin, _ in offsets]
            result.append((ids, [i == 0 or word != words[i - 1] for i, word in enumerate(words)]))
        return result

    def _encode(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Ids and the (begin, end) characters of each, in order."""
        for text, encoding in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            if self.special_ids.isdisjoint(encoding.ids) or not self._special_names.search(text):
                yield encoding.ids, encoding.offsets
                continue
            # A vocabulary from elsewhere may hold "</s>" as an ordinary piece: break such words after their first sign.
            ids, offsets = [], []
            cuts = [0, *(match.start() + 1 for match in self._special_names.finditer(text)), len(text)]
            for begin, end in zip(cuts, cuts[1:], strict=False):
                piece = self._tokenizer.encode(text[begin:end], add_special_tokens=False)
                ids += piece.ids
                offsets += [(begin + first, begin + last) for first, last in piece.offsets]
            yield ids, offsets

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids; `skip_special=False` spells out special tokens. Ids without a token are left out."""
        return self._tokenizer.decode([id for id in map(int, ids) if self.token(id)], skip_special_tokens=skip_special)

    def document(self, ids: list[int]) -> list[int]:
        """`bos t1 .. tn eos`, leaving out a bos or eos that this tokenizer does not have."""
        return [id for id in (self.bos,) if id is not None] + ids + [id for id in (self.eos,) if id is not None]

    def require(self, *roles: str, task: str) -> None:
        """Raise `UserError` if the tokenizer has no token for one of `roles`, which `task` needs."""
        for role in roles:
            if getattr(self, role) in (None, []):
                raise UserError(f"task={task} needs a {role} token ({' or '.join(NAMES[role])}), which this tokenizer "
                                f"lacks: take one of tokenizer={KINDS[role]}" +
                                ", or name it in tokenizer.special" * (role in ROLES))


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


def train_unigram(documents: Iterable[str], vocab_size: int, sentinels: int = N_SENTINELS) -> Tokenizer:
    """T5's Unigram: <pad> </s> <unk> are ids 0 to 2, then the 256 bytes, the pieces by probability, <extra_id_0> ...

    Pieces keep their spaces as they are. A character without a piece is spelled in bytes, so <unk> never occurs.
    """
    special = ["<pad>", "</s>", "<unk>"]
    room = _room(vocab_size, len(special) + 256 + sentinels, f"256 bytes, 3 special tokens and {sentinels} sentinels")
    trained = tokenizers.Tokenizer(models.Unigram())
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


def load(path: str | Path, special: Mapping[str, str] | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that holds one (a run, an exported model)."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"tokenizer.path={path}: there is no such file")
    try:
        return Tokenizer(file.read_text(encoding="utf-8"), special)
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for anything that is not a tokenizer
        raise UserError(f"tokenizer.path={path} is not a tokenizer.json: {str(error).splitlines()[0]}") from error


def _sample(documents: Iterable[str], megabytes: float) -> Iterator[str]:
    """Documents until `megabytes` of UTF-8 have gone by."""
    left = megabytes * 1e6
    for text in documents:
        if left <= 0:
            return
        left -= len(text.encode())
        yield text


def prepare(config: Mapping, documents: Iterable[str]) -> Tokenizer:
    """The tokenizer of a node `tokenizer`: the one at its `path`, else its `kind` trained on `documents`.

    Reads `sample_mb` megabytes at most. Raises `UserError` if it holds more tokens than `vocab_size`, the model's size.
    """
    if config.get("path"):
        tokenizer = load(config["path"], config.get("special"))
    else:
        from hydra.utils import instantiate

        kind: Callable[..., Tokenizer] = instantiate(config["kind"])
        trained = kind(_sample(documents, config["sample_mb"]), vocab_size=config["vocab_size"])
        tokenizer = Tokenizer(trained.json, config.get("special"))
    if len(tokenizer) > config["vocab_size"]:
        where = f"tokenizer.path={config['path']}" if config.get("path") else "the tokenizer"
        raise UserError(f"{where} holds {len(tokenizer)} tokens, more than tokenizer.vocab_size={config['vocab_size']} "
                        f"of the model: set tokenizer.vocab_size={len(tokenizer)}")
    return tokenizer
