"""What nets of each family make of prompts."""

import pytest
import torch

from lmzoo.decoding import generate, search
from lmzoo.decoding.answering import answer, check_known, fill, has_blanks
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_bpe, train_wordpiece
from models import make

PROMPTS = ["the cat", "a", "the cat sat on the mat"]


def net(kind, tokenizer=None, **words):
    tokenizer = tokenizer or byte([], 400)
    made = make(kind, vocab_size=len(tokenizer), max_len=64, **words)
    made.tokenizer = tokenizer
    return made


@pytest.mark.parametrize("kind", ["gpt", "llama", "transformer", "t5"])
def test_a_batch_gives_what_its_prompts_give_alone(kind):
    model = net(kind)
    for words in ({}, {"temperature": 2.0}, {"n_beams": 3, "n_best": 2}):
        together = answer(model, PROMPTS, max_new_tokens=6, **words)
        for i, prompt in enumerate(PROMPTS):
            alone = answer(model, [prompt], max_new_tokens=6, **words, seed=i)
            for one, other in zip(alone[0], together[i], strict=True):
                assert one | {"log_probability": 0} == other | {"log_probability": 0}
                assert one.get("log_probability", 0) == pytest.approx(other.get("log_probability", 0), abs=1e-3)


def test_a_decoder_continues_behind_bos_with_the_likeliest():
    model, tokenizer = net("gpt"), byte([], 400)
    row = torch.tensor([[tokenizer.bos, *tokenizer.encode("the cat")]])
    expected = generate(model, row, max_new_tokens=8, eos=tokenizer.eos)[0, row.shape[1] :]
    text = tokenizer.decode(torch.cat([row[0], expected]).tolist()).removeprefix("the cat")
    assert answer(model, ["the cat"], max_new_tokens=8) == [[{"prompt": "the cat", "answer": text}]]


def test_an_encoder_decoder_reads_up_to_eos_and_answers_from_start():
    model, tokenizer = net("transformer"), byte([], 400)
    row = torch.tensor([[*tokenizer.encode("the cat"), tokenizer.eos]])
    ids, total = search(model, row, None, 8, eos=tokenizer.eos, start=tokenizer.start, n_beams=2)
    [[record]] = answer(model, ["the cat"], max_new_tokens=8, n_beams=2)
    assert record["answer"] == tokenizer.decode(ids[0, 0, 1:].tolist())
    assert record["log_probability"] == pytest.approx(total.item(), abs=1e-4)


def test_the_best_answers_come_with_log_probabilities_and_end_before_a_stop_string():
    model = net("gpt")
    [found] = answer(model, ["the"], max_new_tokens=6, n_beams=4, n_best=3)
    totals = [record["log_probability"] for record in found]
    assert len(found) == 3 and totals == sorted(totals, reverse=True) and max(totals) < 0
    stop = found[0]["answer"][2:4]
    [cut] = answer(model, ["the"], max_new_tokens=6, n_beams=4, n_best=1, stop=[stop])
    assert cut[0]["answer"] == found[0]["answer"].partition(stop)[0]


def test_what_streams_is_the_answer():
    model, heard = net("gpt"), {}
    answers = answer(model, PROMPTS, max_new_tokens=20, temperature=1.0,
                     stream=lambda i, piece: heard.update({i: heard.get(i, "") + piece}))  # fmt: skip
    assert [record["answer"] for (record,) in answers] == [heard.get(i, "") for i in range(3)]


def test_who_fills_blanks():
    assert has_blanks(net("bert"), "no blank") and has_blanks(net("t5"), "a {}") and not has_blanks(net("t5"), "a b")
    assert has_blanks(net("t5"), "a <extra_id_3> b") and not has_blanks(net("gpt"), "a {}")


def test_blanks():
    [record] = fill(net("bert"), "the {} sat on a <mask>", n_best=5)
    assert [len(blank) for blank in record["blanks"]] == [5, 5]
    assert len(fill(net("bert"), "the {}")[0]["blanks"][0]) == 3
    [record] = fill(net("t5"), "the {} sat on {} mat", max_new_tokens=8)
    assert list(record["spans"]) == ["<extra_id_0>", "<extra_id_1>"]


@pytest.mark.parametrize("words, word", [
    ({"temperature": 0.5}, "temperature"), ({"min_p": 0.1}, "min_p"), ({"n_beams": 2}, "n_beams"),
    ({"stop": ["a"]}, "stop"), ({"repetition_penalty": 1.1}, "repetition_penalty"),
])  # fmt: skip
def test_blanks_are_not_sampled(words, word):
    for kind in ("bert", "t5"):
        with pytest.raises(UserError, match=f"^{word}: an encoder.* fills blanks with what is likeliest"):
            fill(net(kind), "a {}", **words)
    with pytest.raises(UserError, match="^n_best: an encoder-decoder"):
        fill(net("t5"), "a {}", n_best=2)


def test_text_without_tokens_is_refused_by_name():
    tokenizer = train_wordpiece(["the cat sat"], 40)
    check_known(tokenizer, "the cat")
    with pytest.raises(UserError, match="no token for '你', '!' of the prompt"):
        answer(net("gpt", tokenizer), ["the 你 cat!"])
    with pytest.raises(UserError, match="no token for 'z' of the prompt"):
        fill(net("bert", tokenizer), "z {} <MASK>".replace("<MASK>", tokenizer.token(tokenizer.mask)))
    check_known(train_bpe(["the cat"], 300), "the 你 cat!")  # bytes have no unknown text


@pytest.mark.parametrize("kind, words, line", [
    ("gpt", {"max_new_tokens": 64}, "positions"), ("gpt", {"top_k": 999}, "top_k=999 must be between 1"),
    ("gpt", {"n_best": 2}, "n_best=2 must be between 1 and n_beams=1"), ("gpt", {"stop": [""]}, "aren't empty"),
    ("bert", {}, "family encoder, which fills masks"),
])  # fmt: skip
def test_refusals(kind, words, line):
    with pytest.raises(UserError, match=line):
        answer(net(kind), ["the cat"], **({"max_new_tokens": 4} | words))
    with pytest.raises(UserError, match="no blank"):
        fill(net("bert"), "no blank")
    with pytest.raises(UserError, match="999 tokens for a blank"):
        fill(net("bert"), "a {}", n_best=999)


def test_an_empty_prompt():
    assert len(answer(net("gpt"), [""], max_new_tokens=2)) == 1
    with pytest.raises(UserError, match="the prompt is empty, and the tokenizer has no bos"):
        model = net("gpt")
        model.tokenizer.bos = None
        answer(model, [""])
