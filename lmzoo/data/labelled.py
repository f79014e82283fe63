"""Documents with a label of the kind that the task wants (`task.labels`), and the columns of a row that make them.

    class      the name of a class          classes    the names of any number of classes, none included
    number     a finite float               tags       the name of a tag for each of the words
    text       no label, but a second text that is to be written
    turns      no label, but who says what in a conversation

Without a kind, as in pretraining, a document may have the name of a class all the same.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import UserError, few

Label = str | float | tuple[str, ...]
KINDS = {None: str, "class": str, "classes": tuple | list, "number": float | int, "tags": tuple | list, "text": None,
         "turns": None}  # fmt: skip
SEPARATOR = "\x1f"  # between the names of a set of classes, where it is one name
OTHERS = ("pair_column", "target_column", "label_column", "tags_column", "split_column")  # than the (first) text's
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
USUAL = {"words_column": "words", "tags_column": "tags", "target_column": "target", "label_column": "label",
         "messages_column": "messages"}  # fmt: skip


class Document(NamedTuple):
    """A text, its label if it has one, and the split it belongs to if its source fixes that.

    `second` is the other text of a pair, or the one that is to be written; `words` are what the text was joined from by
    blanks, `messages` the conversation whose content it is. With `more` the text goes on in the next item: a very long
    one comes in parts, which are cut before white space that follows something else (where byte-level tokens end as
    well), or between any two characters where there is none.
    """

    text: str
    label: Label | None = None
    split: str | None = None  # "train", "val" or "test"
    more: bool = False
    second: str | None = None
    words: tuple[str, ...] | None = None
    messages: tuple[dict, ...] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.second is None else (self.text, self.second)

    @property
    def content(self) -> str:
        """What documents that are equal have in common: the text, or both, or who said what."""
        if self.messages:
            return json.dumps(self.messages)
        return self.text if self.second is None else repr(self.texts)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of its texts."""
        return len(self.text.encode()) + (0 if self.second is None else len(self.second.encode()))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What readers of rows share: which columns make a document.

    The text is in "text" if `text_column` (of jsonl: `field`) is not given, the label in "label", the words of a text
    whose words have tags in "words" and these in "tags", the text to write in "target", a conversation in "messages", a
    list of {"role": ..., "content": ...}. `pair_column` holds a second text. Several classes are a list, or a text that
    is cut at `label_separator`; words and tags are lists, or texts with blanks between them. If no task asks for
    labels, a column "label" is taken where there is one and it holds a class. `template` is what the text stands in, at
    its {}. `split_column` says which split a row is of. `kind` is what `task.labels` says.
    """

    pair_column: str | None = None
    target_column: str | None = None
    words_column: str | None = None
    tags_column: str | None = None
    messages_column: str | None = None
    label_separator: str | None = None
    template: str | None = None
    split_column: str | None = None
    kind: str | None = None
    text_word = "text_column"

    @cached_property
    def columns(self) -> dict[str, str]:
        """{word: the column that must be there}"""
        text = ("words_column" if self.kind == "tags" or self.words_column else
                "messages_column" if self.kind == "turns" or self.messages_column else self.text_word)
        label = {None: None, "tags": "tags_column", "text": "target_column", "turns": None}
        label = label.get(self.kind, "label_column")
        given = [word for word in OTHERS if word == label or getattr(self, word)]
        return {word: getattr(self, word) or USUAL.get(word, "text") for word in (text, *given)}

    @cached_property
    def second_word(self) -> str | None:
        """The word whose column holds the second text."""
        return next((word for word in ("pair_column", "target_column") if word in self.columns), None)

    @cached_property
    def asked(self) -> bool:
        """Whether somebody asks for labels."""
        return bool(self.kind or self.label_column)

    def among(self, file: str, found: Collection[str]) -> dict[str, str]:
        """{word: column} of a table with these columns; UserError if one is missing, or there twice."""
        columns = self.columns if self.asked or "label" not in found else self.columns | {"label_column": "label"}
        for word, name in columns.items():
            if (n := list(found).count(name)) != 1:
                raise UserError(f"{file} has {'more than one' if n else 'no'} column data.{word}={name}; the columns "
                                f"are {few(found)}")
        return columns

    def document(self, row: Mapping[str, Any], split: str | None = None) -> Document:
        """The document of a row, {word: what stands in its column}; ValueError where that is not what it should be."""
        split = self._split(row["split_column"]) if "split_column" in row else split
        if "messages_column" in row:
            messages = self._messages(row["messages_column"])
            return Document("\n".join(message["content"] for message in messages), None, split, messages=messages)
        words = self._items(row, "words_column") if "words_column" in row else None
        text = self._text(row, self.text_word) if words is None else " ".join(words)
        second = self._text(row, self.second_word) if self.second_word else None
        empty = next((what for what, own in (("text", text), ("second text", second)) if own is not None
                      and not own.strip()), None)
        text = self.template.replace("{}", text) if self.template else text
        if self.kind == "tags":
            label = self._items(row, "tags_column")
            if len(label) != len(words):
                raise ValueError(f"{len(label)} tags for {len(words)} words")
        else:
            label = self._label(row.get("label_column"))
        if self.kind and empty:
            raise ValueError(f"the {empty} is empty: leave the row out")
        return Document(text, label, split, False, second, words)

    def _text(self, row: Mapping[str, Any], word: str) -> str:
        text = row[word]
        if not isinstance(text, str):
            raise ValueError(f"data.{word}={self.columns[word]} is not text but {type(text).__name__}")
        return text if text.isascii() else storable(text, "text")

    def _split(self, name) -> str:
        if not isinstance(name, str) or (split := SPLITS.get(name.strip().lower())) is None:
            raise ValueError(f"data.split_column={self.split_column}: {name!r:.50} is none of {', '.join(SPLITS)}")
        return split

    def _items(self, row: Mapping[str, Any], word: str) -> tuple[str, ...]:
        """The words, or their tags: a list, or a text with blanks between them."""
        items = row[word].split() if isinstance(row[word], str) else row[word]
        if not isinstance(items, list):
            raise ValueError(f"data.{word}={self.columns[word]} is no list of {word.partition('_')[0]} but "
                             f"{type(items).__name__}")
        words = word == "words_column"
        for item in items:
            if item == "" or not isinstance(item, str if words else str | int):
                raise ValueError(f"data.{word}={self.columns[word]}: {item!r:.50} in its list is not a text")
        return tuple(storable(item, "text") if words else class_name(item) for item in items)

    def _messages(self, messages) -> tuple[dict, ...]:
        place = f"data.messages_column={self.columns['messages_column']}"
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{place} is no list of messages but {messages!r:.50}")
        for message in messages:
            told = message if isinstance(message, dict) else {}
            if not (isinstance(told.get("role"), str) and isinstance(told.get("content"), str)):
                raise ValueError(f'{place}: {message!r:.50} is no message, {{"role": "user", "content": "..."}}')
            storable(json.dumps(message, ensure_ascii=False), "text")
        if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
            raise ValueError(f"{place}: no message has the role assistant and says something: leave the row out")
        return tuple(messages)

    def _label(self, value) -> Label | None:
        if self.kind == "number":
            return number(value)
        if self.kind != "classes" or value is None:
            return class_name(value, self.asked)
        if isinstance(value, str):
            value = value.split(self.label_separator) if self.label_separator else [value]
            value = [name for name in map(str.strip, value) if name]
        names = [class_name(name) for name in (value if isinstance(value, list) else [value])]
        if None in names or any(SEPARATOR in name for name in names):
            raise ValueError(f"the labels {value!r:.50} hold what is no name of a class")
        return tuple(sorted(set(names)))


def class_name(value, asked_for: bool = True) -> str | None:
    """The name of a class: a text, or a number or truth value as JSON writes it; None for null and "".

    Any other value is refused if the user has `asked_for` its column, else it is no label either.
    """
    if value is None or value == "":
        return None
    try:
        if isinstance(value, str):
            return storable(value, "label")
        if isinstance(value, bool | int | float) and value == value:
            return json.dumps(value)
        raise ValueError(f"the label {value!r:.50} is not a text, a number, true or false")
    except ValueError:
        if asked_for:
            raise
        return None


def whole_texts(documents: Iterable[Document]) -> Iterator[Document]:
    """Each document in one, however long its text is."""
    parts: list[str] = []
    for document in documents:
        parts.append(document.text)
        if not document.more:
            yield document._replace(text="".join(parts))
            parts = []


def number(value) -> float | None:
    """A finite number, or a text that says one; None for null and ""."""
    if value is None or value == "":
        return None
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"the label {value!r:.50} is not a finite number")
    return found


def names_in(label: str, kind: str | None) -> list[str]:
    """The classes that a label stands for as a shard notes it: of a set, which may be empty, all."""
    return [name for name in label.split(SEPARATOR) if name] if kind == "classes" else [label]


def storable(text: str, what: str) -> str:
    """The text; ValueError where UTF-8 has no bytes for it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the {what} holds half of a surrogate pair, which no file can store") from None
    return text
