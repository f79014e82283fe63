"""A tokenizer that goes to Hugging Face's files, or comes from them, gives the same ids and keeps its roles."""

import json

import pytest
import torch

import models
from lmzoo import hf, tokenizer
from lmzoo.decoding.answering import prompt_ids

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
        assert theirs(text, add_special_tokens=False).input_ids == own.encode(text)
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [own.bos, own.eos, own.pad]
    assert [theirs.unk_token_id, theirs.mask_token_id] == [own.unk, own.mask]
    assert set(theirs.all_special_ids) >= own.special_ids and len(theirs) == len(own)
    back = hf.from_hf(tmp_path).tokenizer
    assert (back.hash, back.sentinels) == (own.hash, own.sentinels)


READ = [("gpt", "train_bpe"), ("llama", "byte"), ("gpt", "train_unigram"), ("bert", "train_wordpiece"),
        ("bert", "byte"), ("t5", "train_unigram"), ("t5_v1_0", "char")]  # fmt: skip
AUTO = {"encoder": "MaskedLM", "decoder": "CausalLM", "encoder-decoder": "Seq2SeqLM"}


@pytest.mark.parametrize(("name", "kind"), READ)
def test_a_text_is_read_as_the_net_reads_it(name, kind, tmp_path):
    """A decoder's prompt behind bos, an encoder's document, an encoder-decoder's up to eos; and back without them."""
    ours = models.make(name, vocab_size=KINDS[kind], max_len=96)
    ours.tokenizer = own = getattr(tokenizer, kind)(DOCUMENTS, KINDS[kind])
    hf.to_hf(ours, tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    wanted = [own.document(own.encode(text)) if name == "bert" else prompt_ids(ours, text) for text in TEXTS]
    assert theirs(TEXTS).input_ids == wanted
    net = getattr(transformers, f"AutoModelFor{AUTO[ours.family]}").from_pretrained(tmp_path / "hf")
    given = theirs(TEXTS[0], return_tensors="pt")  # with all that the tokenizer names, and the net takes
    answers = [given.input_ids[:, :3]] if ours.family == "encoder-decoder" else []
    logits = net(**given, **dict(zip(["decoder_input_ids"], answers, strict=False))).logits
    torch.testing.assert_close(logits, ours(torch.tensor(wanted[:1]), None, *answers), atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    for folder in "hf", "again":
        back = hf.read_tokenizer(tmp_path / folder)
        assert back.hash == own.hash and back.encode(TEXTS[0]) == own.encode(TEXTS[0])
    assert tokenizer.load(tmp_path / "hf").encode(TEXTS[0]) == own.encode(TEXTS[0])


@pytest.mark.parametrize(("name", "kind"), [("gpt", "train_bpe"), ("t5", "train_unigram"), ("llama", "char")])
def test_a_batch_of_prompts_is_answered_alike(name, kind, tmp_path):
    own = getattr(tokenizer, kind)(DOCUMENTS, KINDS[kind])
    ours, prompts = models.make(name, vocab_size=len(own), max_len=96), ["Hello", "Hello world, it's"]
    ours.tokenizer = own
    hf.to_hf(ours, tmp_path)
    net = getattr(transformers, f"AutoModelFor{AUTO[ours.family]}").from_pretrained(tmp_path)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)(prompts, return_tensors="pt", padding=True)
    rows = net.generate(**given, max_new_tokens=6, do_sample=False)
    new = rows[:, given.input_ids.shape[1] if ours.family == "decoder" else 1 :].tolist()
    start = None if ours.family == "decoder" else own.start
    for row, prompt in zip(new, prompts, strict=True):
        ids = prompt_ids(ours, prompt)
        answer = ours.generate(torch.tensor([ids]), max_new_tokens=6, eos=own.eos, start=start)[0].tolist()
        answer = answer[len(ids) if start is None else 1 :]
        assert row[: len(answer)] == answer and len(answer) > 1


def test_a_pair_is_read_as_in_training(tmp_path):
    ours = models.make("bert", vocab_size=200)
    ours.tokenizer = own = tokenizer.train_wordpiece(DOCUMENTS, 200)
    hf.to_hf(ours, tmp_path)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path)("hello world", "a test")
    first, second = [own.bos, *own.encode("hello world"), own.eos], [*own.encode("a test"), own.eos]
    assert given.input_ids == first + second
    assert given.token_type_ids == [0] * len(first) + [1] * len(second)


def test_their_tokenizer_is_read_with_its_roles(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##ly", "你", "!"]
    theirs = transformers.BertTokenizer(vocab={word: id for id, word in enumerate(words)})
    theirs.save_pretrained(tmp_path / "bert")
    own = hf.read_tokenizer(tmp_path / "bert")
    assert own.encode("Hello worldly 你!") == [5, 6, 7, 8, 9]
    assert (own.pad, own.unk, own.bos, own.eos, own.mask) == (0, 1, 2, 3, 4)
    own = tokenizer.byte([], 400)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=own._tokenizer, pad_token="<unk>", eos_token="<s>",
                                                   unk_token="<s>")  # fmt: skip
    theirs.save_pretrained(tmp_path / "odd")
    own = hf.read_tokenizer(tmp_path / "odd")
    assert (own.token(own.pad), own.token(own.eos), own.unk) == ("<unk>", "<s>", None)


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
