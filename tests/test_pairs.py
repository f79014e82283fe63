"""What each family reads of a text after another, and the log-likelihood that comes of it."""

import pytest
import torch

from lmzoo.errors import UserError
from lmzoo.likelihood.pairs import Pair, Reader, cut_in_two, likelihoods, masked
from spoken import bpe, net

PAIRS = [Pair("the cat", "sat", " "), Pair("", "a mat", " "), Pair("it saw ", "one dog run", ""), Pair("x", "y")]


def alone(model, row, labels, source=None):
    """The sum of log p of labels at the last positions of one row, without padding."""
    ids = torch.tensor([row])
    with torch.no_grad():
        logits = model(ids)[0] if source is None else model(torch.tensor([source]), None, ids)[0]
    return sum(logits[at].log_softmax(-1)[label].item() for at, label in labels)


def test_a_decoder_is_asked_for_each_token_behind_bos():
    model = net("gpt")
    encode, bos = model.tokenizer.encode, model.tokenizer.bos
    wholes = [("the cat", " sat"), ("", "a mat"), ("it saw", " one dog run"), ("x", "y")]
    for (before, text), found in zip(wholes, likelihoods(model, PAIRS, 3), strict=True):
        first, second = [bos, *encode(before)], encode(text)
        labels = [(len(first) - 1 + i, id) for i, id in enumerate(second)]
        assert found.log_likelihood == pytest.approx(alone(model, first + second, labels), abs=1e-4)
        assert found.n_tokens == len(second)


def test_an_encoder_is_asked_for_each_token_while_it_sees_the_others():
    model = net("bert")
    tokenizer = model.tokenizer
    wholes = [("the cat", " sat"), ("", "a mat"), ("it saw", " one dog run"), ("x", "y")]
    for (before, text), found in zip(wholes, likelihoods(model, PAIRS, 3), strict=True):
        ids, expected = tokenizer.document(tokenizer.encode(before + text)), 0.0
        first = 1 + len(tokenizer.encode(before))
        for place in range(first, len(ids) - 1):
            row = ids[:place] + [tokenizer.mask] + ids[place + 1 :]
            expected += alone(model, row, [(place, ids[place])])
        assert found.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert found.n_tokens == len(ids) - 1 - first


def test_an_encoder_decoder_writes_the_text_and_its_end():
    model = net("t5")
    encode, eos, start = model.tokenizer.encode, model.tokenizer.eos, model.tokenizer.start
    for pair, found in zip(PAIRS, likelihoods(model, PAIRS, 3), strict=True):
        answer = [*encode(pair.text), eos]
        expected = alone(model, [start, *answer[:-1]], list(enumerate(answer)), [*encode(pair.before), eos])
        assert found == pytest.approx((expected, len(answer)), abs=1e-4)


def test_texts_are_cut_where_lm_eval_cuts_them():
    """White space at the end of the first belongs to the second; a token over the border to neither side's gain."""
    tokenizer = bpe()
    for before, text in [("the cat", " sat"), ("the cat ", "sat"), ("the c", "at"), ("one ", " dog")]:
        bare = before.rstrip()
        first, second = cut_in_two(tokenizer, before, text)
        assert first == tokenizer.encode(bare)
        assert second == tokenizer.encode(before + text)[len(tokenizer.encode(bare)) :]
    assert cut_in_two(tokenizer, "the cat ", "sat") == cut_in_two(tokenizer, "the cat", " sat")


def test_what_is_too_long_loses_its_beginning_and_is_counted():
    model = net("gpt", max_len=8)
    reader = Reader(model)
    (row,) = reader.rows(Pair("abcdefghij", "klm"), "key")
    encode = model.tokenizer.encode
    assert row == (encode("efghijkl"), [-100] * 5 + encode("klm"), (), "key")  # 8 are read, the ninth is a target
    assert reader.n_cut == 1
    list(reader.rows(Pair("abcde", "klm"), None))  # bos and 7 are read
    assert reader.n_cut == 1

    reader = Reader(net("t5", max_len=8))
    (row,) = reader.rows(Pair("abcdefghij", "klm"), None)
    assert row.source == [*encode("defghij"), model.tokenizer.eos] and reader.n_cut == 1


def test_the_window_of_a_masked_token_has_it_in_its_middle():
    ids = list(range(100, 110))
    windows = [(row.ids, row.labels.index(at)) for at, row in zip(ids, masked(ids, range(10), 0, 4), strict=True)]
    assert windows[0] == ([0, 101, 102, 103], 0) and windows[1] == ([100, 0, 102, 103], 1)
    assert windows[5] == ([103, 104, 0, 106], 2) and windows[9] == ([106, 107, 108, 0], 3)
    assert [len(labels) - labels.count(-100) for _, labels, *_ in masked(ids, range(10), 0, 4)] == [1] * 10


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_a_text_that_does_not_fit_alone_is_refused(kind):
    with pytest.raises(UserError, match="'abcdefghi' has .* tokens, more than the 8 positions"):
        Reader(net(kind, max_len=8)).ids(Pair("x", "abcdefghi"))


def test_a_text_without_a_token_is_refused():
    with pytest.raises(UserError, match="'' adds no token of its own"):
        Reader(net("gpt")).ids(Pair("x", ""))
