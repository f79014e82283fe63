import json
import os
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

import lmzoo
from lmzoo import tokenizer
from lmzoo.errors import UserError
from lmzoo.literal import plain
from lmzoo.tokenizer import Tokenizer, byte, char, prepare, train_bpe, train_unigram, train_wordpiece

ENGLISH = ["The quick brown fox jumps over the lazy dog.",
           "Return a new list, sorted by key; it's stable.\n\n    f(x_1) == 42"]
CHINESE = ["我爱北京天安门，天安门上太阳升。", "今天天气很好，我们去公园散步吧！"]
CORPUS = (ENGLISH + CHINESE) * 5
NASTY = ["", " ", "\n", " lead and trail ", "tabs\tand\r\nCRLF", "NUL\x00", "▁ is not a space",
         "龘 unseen 😀 Ünï 한국어 עברית", *CORPUS[:4]]
SPELT = "<|endoftext|> [MASK] [CLS] </s> <s> <pad> <unk> <mask> <extra_id_0> <extra_id_99> <0x41>"
KINDS = {"bpe": train_bpe, "wordpiece": train_wordpiece, "unigram": partial(train_unigram, whitespace="kept"),
         "char": char, "byte": byte}
EXACT = ["bpe", "unigram", "char", "byte"]


@pytest.fixture(scope="module")
def trained():
    return {name: kind(CORPUS, 520) for name, kind in KINDS.items()}


@pytest.mark.parametrize("kind", EXACT)
def test_decoding_gives_back_the_text(trained, kind):
    for text in [*NASTY, SPELT]:
        assert trained[kind].decode(trained[kind].encode(text)) == text


def test_unigram_makes_one_space_of_white_space():
    unigram = train_unigram(CORPUS, 520)
    for text in [*NASTY, SPELT]:
        single = re.sub(r"\s+", " ", text)
        ids = unigram.encode(text)
        assert unigram.decode(ids) == single and ids == unigram.encode(single), text
    assert [starts for _, starts in unigram.encode_words(["a\n\n    b"])] == [[True, True]]


@pytest.mark.parametrize("kind", KINDS)
def test_chinese_is_split(trained, kind):
    ids = trained[kind].encode(CHINESE[0])
    assert len(ids) > 3 and trained[kind].special_ids.isdisjoint(ids)


def test_wordpiece_gives_back_chinese_and_lower_case(trained):
    wordpiece = trained["wordpiece"]
    assert wordpiece.decode(wordpiece.encode("我爱北京，天安门。")) == "我爱北京，天安门。"
    assert wordpiece.decode(wordpiece.encode("The  Quick 北京 fox, 天 安。")) == "the quick 北京 fox, 天安。"


def test_wordpiece_matches_the_longest_piece_first(trained):
    names = [trained["wordpiece"].token(id) for id in trained["wordpiece"].encode("The lazy dog")]
    assert names[0] == "the" and all(not name.startswith("##") for name in names if name in ("the", "lazy", "dog"))
    word, pieces = "".join(name.removeprefix("##") for name in names), set(names)
    assert word == "thelazydog" and len(pieces) == len(names)


def test_special_tokens_in_a_text_are_text(trained):
    for kind, own in trained.items():
        ids = set(own.encode(SPELT)) - ({own.unk} if kind == "wordpiece" else set())
        assert own.special_ids.isdisjoint(ids), kind


def test_special_words_that_a_foreign_vocabulary_holds_as_pieces_are_text_too():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "ab</s>")]
    foreign = Tokenizer(tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0)).to_str())
    assert foreign.eos == 1
    assert [foreign.token(id) for id in foreign.encode("a</s>b")] == ["a", "<", "/", "s", ">", "b"]
    ids, starts = foreign.encode_words(["a</s>b"])[0]
    assert starts == [True, True, True, True, True, True]


def test_first_merges_are_those_of_the_paper():
    words = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3  # Sennrich et al. 2016, section 3.2
    trained = train_bpe(words, 257 + 4)
    assert [trained.token(257 + i) for i in range(4)] == ["es", "est", "lo", "low"]
    assert [trained.token(id) for id in trained.encode("lowest")] == ["low", "est"]


def test_roles(trained):
    bpe, wordpiece, unigram = trained["bpe"], trained["wordpiece"], trained["unigram"]
    assert bpe.bos == bpe.eos == bpe.pad == bpe.start == bpe.id("<|endoftext|>")
    assert (bpe.unk, bpe.mask, bpe.sentinels) == (None, None, [])
    names = [wordpiece.token(id) for id in (wordpiece.pad, wordpiece.unk, wordpiece.bos, wordpiece.eos, wordpiece.mask)]
    assert names == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and wordpiece.start == wordpiece.bos
    assert unigram.bos is None and unigram.start == unigram.pad == 0 and unigram.eos == 1
    assert [unigram.token(id) for id in unigram.sentinels] == [f"<extra_id_{i}>" for i in range(100)]
    assert bpe.document([5]) == [bpe.bos, 5, bpe.eos] and unigram.document([5]) == [5, unigram.eos]
    for kind in ("char", "byte"):
        trained[kind].require("pad", "bos", "eos", "unk", "mask", "start", "sentinels", task="any")


def test_a_missing_role_is_refused_with_what_has_it(trained):
    with pytest.raises(UserError, match=r"task=mlm needs a mask token \(\[MASK\] or <mask>\).*wordpiece, char, byte"):
        trained["bpe"].require("mask", task="mlm")
    with pytest.raises(UserError, match="extra_id_0.*unigram"):
        trained["bpe"].require("sentinels", task="span_corruption")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "char", "byte"])
def test_what_a_role_is_named_is_in_the_vocabulary_of_every_kind(kind):
    """Though the kind itself has no such token; and the vocabulary stays within its size."""
    words = plain(lmzoo.compose("model=gpt", "task=clm", f"tokenizer={kind}", "tokenizer.vocab_size=500",
                                "tokenizer.special.bos=<s>", "tokenizer.special.mask=<hole>").tokenizer)
    tokenizer = prepare(words, ["the text of a document, and of another one"] * 9)
    assert tokenizer.token(tokenizer.bos) == "<s>" and tokenizer.token(tokenizer.mask) == "<hole>"
    assert len(tokenizer) <= 500 and {tokenizer.bos, tokenizer.mask}.isdisjoint(tokenizer.encode("<s> <hole>"))


def test_special_overrides_a_role(trained):
    named = Tokenizer(trained["wordpiece"].json, {"pad": "[UNK]"})
    assert named.pad == named.unk and named.hash != trained["wordpiece"].hash
    with pytest.raises(UserError, match="'<none>' is not a token"):
        Tokenizer(trained["wordpiece"].json, {"pad": "<none>"})
    with pytest.raises(UserError, match="special.padding is not a role"):
        Tokenizer(trained["wordpiece"].json, {"padding": "[PAD]"})


@pytest.mark.parametrize("kind", KINDS)
def test_decode_skips_special_tokens_unless_asked(trained, kind):
    tokenizer = trained[kind]
    for id in tokenizer.special_ids:
        ids = [id, *tokenizer.encode("we"), id]
        assert tokenizer.decode(ids) == "we"
        assert tokenizer.decode(ids, skip_special=False).count(tokenizer.token(id)) == 2
    assert tokenizer.decode([len(tokenizer) + 5]) == ""  # an id of the model's padded vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_words_begin_where_words_begin(trained, kind):
    """Pieces of a word share one decision; each Chinese character is a word, and so is each sign."""
    text = "The lazy dog, 我天步 it"
    ids, starts = trained[kind].encode_words([text])[0]
    assert ids == trained[kind].encode(text) and len(starts) == len(ids)
    assert sum(starts) == len(["The", "lazy", "dog", ",", "我", "天", "步", "it"]) and starts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_s_first_piece_is_found(trained, kind):
    """Words are read as a text with blanks between them; what stands before the next first piece is the word itself."""
    words = ["The", "quick,", "brown", "Neu York", "我爱", "x", "😀", ".", "lazy</s>dog", "it's"]
    own, text = trained[kind], " ".join(words)
    (ids, firsts), (_, alone) = own.encode_firsts([words, ["dog"]])
    assert ids == own.encode(text) and len(firsts) == len(ids)
    assert [number for number in firsts if number >= 0] == [*range(len(words))]
    assert [number for number in alone if number >= 0] == [0]
    places = [i for i, number in enumerate(firsts) if number >= 0]
    for word, begin, end in zip(words, places, [*places[1:], None], strict=True):
        found = own.decode(ids[begin:end], skip_special=False)
        if kind == "wordpiece":
            found, word = found.replace(" ", ""), word.lower().replace(" ", "")
            found = word if "[UNK]" in found else found.removeprefix("##")
        assert found.strip() == word


def test_the_blank_before_a_word_is_read_as_in_a_text(trained):
    """Byte-level BPE has pieces that begin with a blank; of characters the blank is a piece by itself, with no word."""
    bpe, characters = trained["bpe"], trained["char"]
    (ids, firsts), = bpe.encode_firsts([["the", "lazy", "dog"]])
    assert [bpe.decode([id])[0] for id, number in zip(ids, firsts, strict=True) if number > 0] == [" ", " "]
    assert list(characters.encode_firsts([["ab", "c"]]))[0][1] == [0, -1, -1, 1]


def test_words_without_a_piece_have_none():
    own = train_wordpiece(["the dog sees"] * 9, 60)
    (ids, firsts), (nothing, none) = own.encode_firsts([["the", "\u200d\x01", "dog", ""], []])
    assert ids == own.encode("the dog") and nothing == none == []
    assert [number for number in firsts if number >= 0] == [0, 2]


def test_size_is_at_most_what_was_asked(trained):
    assert all(len(own) <= 520 for own in trained.values())
    korean = ["".join(chr(0xAC00 + (i * 37 + j) % 900) for j in range(6)) for i in range(900)]
    for kind, train in KINDS.items():
        assert len(train(korean, 700)) <= 700, kind


def test_rare_characters_leave_room_for_pieces():
    """More characters than the vocabulary has places: frequent words still become one piece, and nothing is lost."""
    documents = ["".join(chr(0x4E00 + i) for i in range(j, 3000, 50)) for j in range(50)]
    documents += ["learning", "learned", "learns", "unlearning", "relearning"] * 50
    unigram = train_unigram(documents, 700)
    assert unigram.decode(unigram.encode(documents[3])) == documents[3]
    assert len(unigram.encode("learning")) < 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_without_room_is_refused(kind):
    with pytest.raises(UserError, match="tokenizer.vocab_size=5 leaves no room"):
        KINDS[kind](CORPUS, 5)


def test_training_gives_the_same_file_in_every_process(trained):
    code = """
from test_tokenizer import CORPUS, KINDS, NASTY
import pydoc
texts = CORPUS + NASTY + [doc for value in vars(pydoc).values() if (doc := getattr(value, "__doc__", None))]
for name, kind in KINDS.items():
    print(name, kind(iter(texts), 700).json)
"""
    run = [sys.executable, "-c", code]
    runs = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent, encoding="utf-8",
                             env=os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads})
            for seed, threads in (("0", "1"), ("1", "2"), ("2", "4"))]
    out = [run.communicate()[0] for run in runs]
    assert len(out[0].splitlines()) == len(KINDS) and out[0] == out[1] == out[2]


def test_pickle_and_json_give_the_same_tokenizer(trained):
    for own in trained.values():
        for copy in (pickle.loads(pickle.dumps(own)), Tokenizer(own.json)):
            assert copy.hash == own.hash and copy.encode(SPELT) == own.encode(SPELT)


def test_load(tmp_path, trained):
    (tmp_path / "tokenizer.json").write_text(trained["bpe"].json, encoding="utf-8")
    assert tokenizer.load(tmp_path).hash == tokenizer.load(tmp_path / "tokenizer.json").hash == trained["bpe"].hash
    with pytest.raises(UserError, match="no such file"):
        tokenizer.load(tmp_path / "none")
    (tmp_path / "broken.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="broken.json is not a tokenizer.json"):
        tokenizer.load(tmp_path / "broken.json")


def test_prepare_trains_on_the_sample_or_loads(tmp_path, trained):
    read = []

    def documents():
        for i in range(100):
            read.append(i)
            yield "x" * 1000

    config = {"kind": {"_target_": "lmzoo.tokenizer.char", "_partial_": True}, "vocab_size": 512, "sample_mb": 0.005}
    assert tokenizer.prepare(config, documents()).id("x") is not None
    assert len(read) == 5  # kilobytes
    (tmp_path / "tokenizer.json").write_text(trained["bpe"].json, encoding="utf-8")
    config["path"] = str(tmp_path)
    assert tokenizer.prepare(config, ()).hash == trained["bpe"].hash
    config["vocab_size"] = 300
    with pytest.raises(UserError, match=f"holds {len(trained['bpe'])} tokens, more than tokenizer.vocab_size=300"):
        tokenizer.prepare(config, ())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_can_be_appended(trained, kind):
    before = trained[kind]
    wider = before.extended(["<user>", "ça va"])
    n = len(before)
    assert len(wider) == n + 2 and wider.encode("ça va<user>") == [n + 1, n]
    assert wider.encode("other words") == before.encode("other words")
    assert "<user>" in wider.decode([*wider.encode("he said <user>")])  # ordinary tokens, not special ones
    assert all(getattr(wider, role) == getattr(before, role) for role in ("bos", "eos", "pad", "special_ids"))
    assert pickle.loads(pickle.dumps(wider)).encode("<user>") == [n]
    for tokens, message in ((["<user>"], "'<user>' is a token already"), (["a", "a"], "'a' is a token already"),
                            ([" "], "a blank is no token")):
        with pytest.raises(UserError, match=message):
            (wider if tokens == ["<user>"] else before).extended(tokens)


def test_a_sample_is_never_more_than_asked():
    read = []

    def documents():
        for text in ("abc", "", "北京", "xyz"):
            read.append(text)
            yield text

    assert list(tokenizer.sample(documents(), 7e-6)) == ["abc", "", "北"]  # 3 + 0 + 6 bytes, of which 4 are left for 6
    assert read == ["abc", "", "北京"]
    assert list(tokenizer.sample(documents(), 1)) == ["abc", "", "北京", "xyz"]


def test_training_reads_its_sample_once(trained):
    """A generator is enough for every kind, and gives what a list gives."""
    for kind, train in KINDS.items():
        assert train((text for text in CORPUS), 520).hash == trained[kind].hash, kind


@pytest.mark.parametrize("kind", KINDS)
def test_any_mixture_of_scripts_trains_and_comes_back(kind):
    code = ["def f(x):\n\treturn x**2  # 平方", "for (;;) { a[i] <<= 3; }\r\n"]
    emoji = ["👩‍👩‍👧‍👦 e\u0301 🇩🇪", "ﬁ \u200b \ufeff"]
    own = KINDS[kind](["", " ", *code, *emoji, *CHINESE, *ENGLISH, ""], 700)
    for text in ("", *code, *emoji, *CHINESE):
        again = own.decode(own.encode(text))
        assert own.encode(again) == own.encode(text)
        assert again == text or kind == "wordpiece"
    assert own.encode("") == []


@pytest.mark.parametrize("kind", EXACT)
def test_training_on_nothing_leaves_what_every_text_can_be_spelt_in(kind):
    own = KINDS[kind]([""], 520)
    assert own.decode(own.encode("a 北\n")) == "a 北\n"


def test_measures_are_counts(trained):
    texts = ["The lazy dog", "", "北京"]  # 12 + 0 + 6 bytes
    assert tokenizer.measure(trained["byte"], texts) == (18, 18, 0)
    assert str(tokenizer.measure(trained["byte"], texts)) == "1.00 bytes per token, 0.000% unknown"
    found = tokenizer.measure(trained["wordpiece"], ["the the the 𝄞"])
    assert found == (16, 4, 1) and str(found) == "4.00 bytes per token, 25.000% unknown"
    assert str(tokenizer.measure(trained["bpe"], [])) == "0.00 bytes per token, 0.000% unknown"
