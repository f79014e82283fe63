"""The pieces of a text against its whole, and where it stops."""

import pytest

from lmzoo.decoding.telling import Teller
from lmzoo.tokenizer import byte, char, train_bpe, train_unigram, train_wordpiece

TEXT = "The cat's naïve café: 你好, world! 😀 isn't it (so)?  Twice  spaced.\nA line."
TOKENIZERS = {
    "bpe": train_bpe([TEXT], 300),
    "wordpiece": train_wordpiece([TEXT], 200),
    "unigram": train_unigram([TEXT] * 20, 400),
    "char": char(["The cat's"], 400),
    "byte": byte([], 400),
}


def told(tokenizer, before, ids, stop=(), ends=None):
    pieces = []
    teller = Teller(tokenizer, before, stop, pieces.append)
    for i, id in enumerate(ids):
        if teller.take(id, i + 1 == len(ids) if ends is None else i == ends):
            break
    return pieces, i


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_make_up_the_text_wherever_the_prompt_ends(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT)
    whole = tokenizer.decode(ids)
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        if whole.startswith(before):  # not amid a character
            assert before + "".join(told(tokenizer, ids[:cut], ids[cut:])[0]) == whole


def test_no_piece_holds_half_a_character():
    pieces, _ = told(TOKENIZERS["byte"], [], TOKENIZERS["byte"].encode("a😀é你"))
    assert pieces == ["a", "😀", "é", "你"]


def test_bytes_that_are_no_character_do_not_hold_up_the_rest():
    tokenizer = TOKENIZERS["byte"]
    broken = tokenizer.encode("😀")[:2]
    pieces, _ = told(tokenizer, [], [*broken, *tokenizer.encode("abcd")])
    assert "".join(pieces).endswith("abcd") and len(pieces) > 1
    assert "".join(told(tokenizer, [], broken)[0])  # at the end they are shown as what they are


def test_special_tokens_are_no_text():
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer.encode("The cat")
    assert "".join(told(tokenizer, [], [*ids[:2], tokenizer.eos, *ids[2:], tokenizer.eos])[0]) == "The cat"


@pytest.mark.parametrize("stop, text", [
    (["."], "The cat sat"), (["cat sat"], "The "), (["sat.", "cat"], "The "), (["zebra"], "The cat sat. On"),
    (["On"], "The cat sat. "), (["T"], ""), (["n", " sa"], "The cat"),
])  # fmt: skip
def test_a_text_ends_before_the_first_stop_string(stop, text):
    tokenizer = TOKENIZERS["byte"]
    ids = tokenizer.encode("The cat sat. On")
    pieces, last = told(tokenizer, [], ids, stop)
    assert "".join(pieces) == text
    found = min((at + len(one) for one in stop if (at := "The cat sat. On".find(one)) >= 0), default=len(ids))
    assert last == found - 1  # at the token that completes it


def test_what_may_become_a_stop_string_is_held_back():
    tokenizer, pieces = TOKENIZERS["byte"], []
    teller = Teller(tokenizer, [], ["abc"], pieces.append)
    for id in tokenizer.encode("xxab"):
        teller.take(id)
    assert "".join(pieces) == "xx"
    teller.take(tokenizer.encode("d")[0], ends=True)
    assert "".join(pieces) == "xxabd"
    assert teller.take(tokenizer.encode("e")[0]) and "".join(pieces) == "xxabd"  # it has ended


def test_a_step_decodes_a_few_tokens_however_long_the_text(monkeypatch):
    tokenizer, sizes = byte([], 400), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    told(tokenizer, [], tokenizer.encode("abcdefgh" * 50), ["no such text"])
    assert max(sizes) <= 5
