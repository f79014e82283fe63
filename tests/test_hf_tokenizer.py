"""A tokenizer that goes to Hugging Face's files, or comes from them, gives the same ids and keeps its roles."""

import json

import pytest

import models
from lmzoo import hf, tokenizer

transformers = pytest.importorskip("transformers")

DOCUMENTS = ["Hello world, it's a test of docs. 你好世界", "def f(x): return x + 1  # naïve café\n\n  two  spaces"] * 20
TEXTS = [*DOCUMENTS[:2], "unseen ☃ 🎉 Ünïcödé", "  around  "]
KINDS = {"train_bpe": 400, "train_wordpiece": 200, "train_unigram": 450, "char": 450, "byte": 400}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_comes_along(kind, tmp_path):
    ours = models.make("gpt", vocab_size=KINDS[kind])
    ours.tokenizer = own = getattr(tokenizer, kind)(DOCUMENTS, KINDS[kind])
    hf.to_hf(ours, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text).input_ids == own.encode(text)
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [own.bos, own.eos, own.pad]
    assert [theirs.unk_token_id, theirs.mask_token_id] == [own.unk, own.mask]
    assert set(theirs.all_special_ids) >= own.special_ids and len(theirs) == len(own)
    back = hf.from_hf(tmp_path).tokenizer
    assert (back.hash, back.sentinels) == (own.hash, own.sentinels)


def test_their_tokenizer_is_read_with_its_roles(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##ly", "你", "!"]
    theirs = transformers.BertTokenizer(vocab={word: id for id, word in enumerate(words)})
    theirs.save_pretrained(tmp_path / "bert")
    own = hf.read_tokenizer(tmp_path / "bert")
    assert own.encode("Hello worldly 你!") == [5, 6, 7, 8, 9]
    assert (own.pad, own.unk, own.bos, own.eos, own.mask) == (0, 1, 2, 3, 4)
    own = tokenizer.byte([], 400)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=own._tokenizer, pad_token="<unk>", eos_token="<s>")
    theirs.save_pretrained(tmp_path / "odd")
    own = hf.read_tokenizer(tmp_path / "odd")
    assert (own.token(own.pad), own.token(own.eos)) == ("<unk>", "<s>")


def test_ids_are_written_for_generation(tmp_path):
    ours = models.make("t5", vocab_size=450)
    ours.tokenizer = tokenizer.train_unigram(DOCUMENTS, 450)
    hf.to_hf(ours, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["decoder_start_token_id"] == config["pad_token_id"] == ours.tokenizer.pad
    assert config["eos_token_id"] == ours.tokenizer.eos and config["bos_token_id"] is None
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    ids = models.ids(2, 6, vocab_size=450)
    expected = theirs.generate(ids, max_new_tokens=5, do_sample=False)
    found = ours.generate(ids, max_new_tokens=5, start=ours.tokenizer.start, eos=ours.tokenizer.eos)
    length = min(found.shape[1], expected.shape[1])
    assert found[:, :length].tolist() == expected[:, :length].tolist()
