"""The wrapper of a tokenizer: text to ids and back, and the ids of the roles that tasks need; and opening its file."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import tokenizers

from ..errors import UserError
from .chat import Chat

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
# Chinese characters and kana: signs that are written without spaces and count as a word each
IDEOGRAPHS = "\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# A word with the white space before it: an ideograph, a run of letters and digits, or a single sign
WORD = re.compile(rf"\s*(?:[{IDEOGRAPHS}]|[^\W{IDEOGRAPHS}]+|[^\w\s])|\s+$")


class Tokenizer:
    """Text to ids and back, and the ids of the roles that tasks need.

    `json` is the library's JSON; `special` names the tokens of roles that have unusual names, as {"pad": "<fill>"}.
    `pad, bos, eos, unk, mask, start` are ids or None, `sentinels` the ids of <extra_id_0>, <extra_id_1>, ...
    Without a token for padding `pad` is `eos` (GPT); `start`, with which a decoder begins, is `bos`, else `pad` (T5).
    `chat_template` makes texts of conversations, by `chat`.
    """

    def __init__(self, json: str, special: Mapping[str, str] | None = None, chat_template: str | None = None):
        self._tokenizer = tokenizers.Tokenizer.from_str(json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.special, self.chat_template = dict(special or {}), chat_template
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
        self.bos, self.eos, self.mask = ids["bos"], ids["eos"], ids["mask"]
        self.unk = None if ids["unk"] in (self.bos, self.eos) else ids["unk"]  # GPT-2's never stands for a text
        self.pad = self.eos if ids["pad"] is None else ids["pad"]
        self.start = self.pad if self.bos is None else self.bos
        self.sentinels = []
        while (sentinel := vocabulary.get(f"<extra_id_{len(self.sentinels)}>")) is not None:
            self.sentinels.append(sentinel)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = set(added)
        marked = (id for id, token in added.items() if token.special)
        self.special_ids = {*marked, *self.sentinels, *(id for id in ids.values() if id is not None)}
        names = sorted(map(re.escape, map(self.token, self.special_ids)), key=len, reverse=True)
        self._special_names = re.compile("|".join(names) or r"(?!)")

    def __len__(self) -> int:
        """The number of ids: one more than the largest, so that it is a safe size for an embedding."""
        return self._size

    def __reduce__(self):
        return Tokenizer, (self.json, self.special, self.chat_template)

    def extended(self, tokens: Sequence[str]) -> "Tokenizer":
        """With `tokens` appended to the vocabulary: each is one id wherever it stands in a text."""
        for place, token in enumerate(tokens):
            if not token.strip() or self.id(token) is not None or token in tokens[:place]:
                raise UserError(f"tokenizer.add: {token!r} is a token already" if token.strip() else
                                "tokenizer.add: a blank is no token")
        wider = tokenizers.Tokenizer.from_str(self.json)
        wider.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
        if [wider.token_to_id(token) for token in tokens] != [*range(len(self), len(self) + len(tokens))]:
            raise UserError("tokenizer.add: this tokenizer leaves out ids, so that none can be appended")
        return Tokenizer(wider.to_str(), self.special, self.chat_template)

    @cached_property
    def chat(self) -> Chat:
        """Conversations, where there is a template for them."""
        return Chat(self)

    def conversing(self, template: str) -> "Tokenizer":
        """With a chat template, the token by which this ends a turn being a special one."""
        ends = self.token(Tokenizer(self.json, self.special, template).chat.eos)
        content = json.loads(self.json)
        for token in content["added_tokens"]:
            token["special"] |= token["content"] == ends
        return Tokenizer(json.dumps(content), self.special, template)

    def token(self, id: int) -> str:
        """The token of an id as the vocabulary spells it; "" for an id without one."""
        return self._tokenizer.id_to_token(id) or ""

    def id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text: nothing is added, and no special token is read out of it."""
        return next(self.encode_each([text]))

    def encode_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text in which the names of special tokens are those tokens, and the (begin, end) characters of
        each."""
        self._tokenizer.encode_special_tokens = False
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return encoded.ids, encoded.offsets

    def encode_each(self, texts: list[str]) -> Iterator[list[int]]:
        """`encode` of each text, on all cores; one by one: numbers that are used while they are warm cost less."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # without offsets
        for text, encoded in zip(texts, found, strict=True):
            ids = encoded.ids
            yield ids if self._ordinary(text, ids) else self._broken(text)[0]

    def encode_words(self, texts: list[str]) -> list[tuple[list[int], list[bool]]]:
        """For each text its ids, and for each id whether a word begins there.

        A word is a run of letters and digits, a single other sign, or one Chinese or Japanese character; white space
        belongs to the word after it. This is read from the text, so it is the same notion for every tokenizer.
        """
        result = []
        for text, (ids, offsets) in zip(texts, self._located(texts), strict=True):
            word_of, ends = [], [match.end() for match in WORD.finditer(text)]
            for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                word_of += [number] * (end - begin)
            words = [word_of[min(begin, len(word_of) - 1)] for begin, _ in offsets]
            result.append((ids, [i == 0 or word != words[i - 1] for i, word in enumerate(words)]))
        return result

    def encode_firsts(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[list[int], list[int]]]:
        """For each text, given as words, its ids, and for each id the number of the word whose first piece it is, else
        -1. A word of which the tokenizer leaves nothing has no piece.

        The words are joined by single blanks and read as any text, so a piece may hold the blank before its word.
        """
        for words, (ids, offsets) in zip(texts, self._located([" ".join(words) for words in texts]), strict=True):
            word_of = [number for number, word in enumerate(words) for number in [number] * len(word) + [-1]]
            found, last = [], -1
            for begin, end in offsets:
                word = word_of[end - 1] if end > begin else -1
                found.append(word if word > last else -1)
                last = max(last, word)
            yield ids, found

    def _located(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """For each text its ids and the (begin, end) characters of each."""
        for text, encoded in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            yield (encoded.ids, encoded.offsets) if self._ordinary(text, encoded.ids) else self._broken(text)

    def _ordinary(self, text: str, ids: list[int]) -> bool:
        """Whether no special token was read out of a text. A vocabulary from elsewhere may hold "</s>" as a piece."""
        return not self._special_names.search(text) or self.special_ids.isdisjoint(ids)

    def _broken(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and the (begin, end) characters of each, the names of special tokens broken after their first sign."""
        ids, offsets = [], []
        cuts = [0, *(match.start() + 1 for match in self._special_names.finditer(text)), len(text)]
        for begin, end in pairwise(cuts):
            piece = self._tokenizer.encode(text[begin:end], add_special_tokens=False)
            ids += piece.ids
            offsets += [(begin + first, begin + last) for first, last in piece.offsets]
        return ids, offsets

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
                                f", or name one, tokenizer.special.{role}='{NAMES[role][0]}'" * (role in ROLES))


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
