"""Blanks of a text: what the model is handed, and how its answer is read."""

import math

import pytest
import torch
from torch import nn

from lmzoo.blocks.cache import Cache
from lmzoo.decoding.filling import BLANK, blanked, fill_masks, fill_spans
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_bpe
from models import make

TOKENIZER = byte([], 400)


def code(letter):
    return TOKENIZER.encode(letter)[0]


def encoder(**scores):
    """A net whose logits are these for these letters, far below for the rest, whatever it reads."""
    net = make("bert", vocab_size=len(TOKENIZER) + 10, max_len=64)
    with torch.no_grad():
        net.embed.tokens.weight.zero_()
        net.head.bias.fill_(-100.0)
        net.head.bias[len(TOKENIZER) :] = 100.0  # padded vocabulary
        for letter, score in scores.items():
            net.head.bias[code(letter)] = score
    return net


class Scripted(nn.Module):
    """An encoder-decoder that says a fixed row of ids."""

    family, vocab_size, max_positions, head = "encoder-decoder", len(TOKENIZER) + 10, None, nn.Identity()

    def __init__(self, script):
        super().__init__()
        self.script, self.weight = script, nn.Parameter(torch.zeros(1))

    def encode(self, input_ids, attention_mask):
        self.read = input_ids[0].tolist()
        return torch.zeros(1)

    def cache(self, batch, max_len):
        return Cache([], max_len)

    def decode(self, decoder_input_ids, memory, *masks, cache, readout):
        cache.length += 1
        scores = torch.zeros(1, 1, self.vocab_size)
        scores[..., self.script[cache.length - 1]] = 1.0
        scores[..., -1] = 2.0  # padded vocabulary
        return readout(self.head, scores)


def test_masks():
    net = encoder(a=math.log(5), b=math.log(3), c=math.log(2))
    expected = [("a", pytest.approx(0.5)), ("b", pytest.approx(0.3)), ("c", pytest.approx(0.2))]
    assert fill_masks(net, TOKENIZER, "x {} y {}") == [expected, expected]
    assert fill_masks(net, TOKENIZER, "x <mask> y", top=1) == [expected[:1]]


@pytest.mark.parametrize("text", ["ab {} c", "ab <mask> c"])
def test_masks_are_put_between_the_pieces(text):
    net, seen = encoder(), []
    net.embed.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].tolist()))
    fill_masks(net, TOKENIZER, text)
    t = TOKENIZER
    assert seen == [[t.bos, *t.encode("ab"), t.mask, *t.encode(" c"), t.eos]]


def test_spans():
    t = TOKENIZER
    first, second, third = t.sentinels[:3]
    script = [first, *t.encode("red"), second, *t.encode("tall tree"), third, t.eos]
    net = Scripted(script)
    assert fill_spans(net, t, "a {} car, a {}.") == {"<extra_id_0>": "red", "<extra_id_1>": "tall tree"}
    assert net.read == [*t.encode("a"), first, *t.encode(" car, a"), second, *t.encode("."), t.eos]
    assert fill_spans(Scripted(script), t, "a <extra_id_0> car, a <extra_id_1>.")["<extra_id_1>"] == "tall tree"


def test_a_span_that_was_left_out_is_empty():
    t = TOKENIZER
    net = Scripted([t.sentinels[1], *t.encode("b"), t.eos])
    assert fill_spans(net, t, "{} and {}") == {"<extra_id_0>": "", "<extra_id_1>": "b"}


def test_refusals():
    with pytest.raises(UserError, match="family decoder, which continues a prompt"):
        fill_masks(make("gpt"), TOKENIZER, "a {}")
    with pytest.raises(UserError, match="family encoder"):
        fill_spans(encoder(), TOKENIZER, "a {}")
    with pytest.raises(UserError, match="no blank"):
        fill_masks(encoder(), TOKENIZER, "no blank")
    with pytest.raises(UserError, match="no blank"):
        fill_spans(Scripted([]), TOKENIZER, "no blank")
    with pytest.raises(UserError, match="101 blanks, and the tokenizer has sentinels for 100"):
        fill_spans(Scripted([]), TOKENIZER, "{} " * 101)
    with pytest.raises(UserError, match="longer than the 64 positions"):
        fill_masks(encoder(), TOKENIZER, "a" * 70 + "{}")
    with pytest.raises(UserError, match="mask"):
        fill_masks(encoder(), train_bpe(["a b c"], 300), "a {}")


@pytest.mark.parametrize("n_words", [1, 2])
@pytest.mark.parametrize("text", [
    "one two three four five six seven eight nine ten eleven twelve",
    "Return 3 (three) things, or a list: of 12 other things; never None.",
    "我爱北京天安门，天安门上太阳升。", "a b c d", "x", "1 2 3 4 5 6", "", "a, b",
])  # fmt: skip
def test_blanked_words_put_back_give_the_text(text, n_words):
    holes, taken = blanked(text, n_words)
    assert holes.count(BLANK) == len(taken) <= 2
    assert holes.replace(BLANK, "%s") % tuple(taken) == text
    assert all(part == part.strip() and part[0].isalpha() for part in taken)


def test_blanks_stand_after_a_quarter_and_two_thirds_of_the_words():
    words = "one two three four five six seven eight nine ten eleven twelve"
    assert blanked(words) == ("one two three {} five six seven eight {} ten eleven twelve", ["four", "nine"])
    assert blanked(words, 2)[1] == ["four five", "nine ten"]
