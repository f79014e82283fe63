"""Windows over documents: each token once, from enough before it, and the numbers of transformers by hand."""

import math

import pytest
import torch

import lmzoo
from lmzoo import hf
from lmzoo.errors import UserError
from lmzoo.likelihood.sliding_window import SlidingWindow
from spoken import TEXT, Unigram, net


class Documents:
    """Documents as a split of a token store has them."""

    def __init__(self, tokenizer, *texts):
        rows = [tokenizer.document(tokenizer.encode(text)) for text in texts]
        self.stream, self.ends = sum(rows, []), [sum(map(len, rows[: i + 1])) for i in range(len(rows))]
        self.n_documents, self.n_tokens = len(texts), len(self.stream)
        self.n_bytes = sum(len(text.encode()) for text in texts)

    def span(self, document):
        return (self.ends[document - 1] if document else 0), self.ends[document]

    def read(self, begin, end):
        return torch.tensor(self.stream[begin:end])


TEXTS = [" ".join(TEXT[:n]) for n in (1, 4, 11, 17)] + ["", "°C 你好"]


@pytest.mark.parametrize("length, stride", [(8, 1), (8, 3), (8, 7), (8, 8), (5, 2), (200, 200), (1, 1)])
def test_each_token_once_from_enough_before_it(length, stride):
    documents = Documents(net("gpt").tokenizer, *TEXTS)
    predicted, rows = [], list(SlidingWindow(stride).windows(documents, length))
    for row in rows:
        assert len(row.ids) == len(row.labels) <= length
        context = row.labels.count(-100)
        assert row.labels[:context] == [-100] * context  # what counts is at the end
        assert context == 0 and row.ids[0] == documents.stream[0] or context >= length - stride
        predicted += row.labels[context:]
    expected = [id for i in range(len(TEXTS)) for id in documents.stream[slice(*documents.span(i))][1:]]
    assert predicted == expected


@pytest.mark.parametrize("stride", [3, 8])
def test_the_nats_of_transformers(stride, tmp_path):
    """By the loop of transformers' own guide to perplexity: windows of 8, of which the last new labels count."""
    transformers = pytest.importorskip("transformers")
    ours = net("gpt", max_len=8)
    hf.to_hf(ours, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    nats, n = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor(ours.tokenizer.document(ours.tokenizer.encode(text)))
        told = 0  # of ids[1:]
        for begin in range(0, len(ids), stride):
            row, targets = ids[begin : begin + 8], ids[begin + 1 : begin + 9]
            with torch.no_grad():
                logits = theirs(row[None]).logits[0].log_softmax(-1)
            for at in range(told - begin, len(targets)):
                nats -= logits[at, targets[at]].item()
                n += 1
            told = begin + len(targets)
            if told == len(ids) - 1:
                break
    found = SlidingWindow(stride, batch_size=5)(ours, Documents(ours.tokenizer, *TEXTS))
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert found["loss"] == pytest.approx(nats / n, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / n), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)


def test_bits_by_hand():
    """a is 1 bit, b 2, and eos, the third, 3: over two documents of 3 and 1 bytes."""
    model = Unigram(["a", "b"])
    model.head.bias.data[model.tokenizer.eos] = -3 * math.log(2)
    model.head.bias.data[model.tokenizer.mask] = -3 * math.log(2)  # the rest of the probability
    found = SlidingWindow(1, max_len=2)(model, Documents(model.tokenizer, "aba", "b"))
    assert found["bits_per_byte"] == pytest.approx((1 + 2 + 1 + 3 + 2 + 3) / 4)
    assert found["perplexity"] == pytest.approx(2 ** (12 / 6)) and found["tokens"] == 6


@pytest.mark.parametrize("words, line", [
    ({"stride": 33}, "measure.stride=33 must be between 1 and the window's length, 32"),
    ({"stride": 0}, "measure.stride=0 must be"),
    ({"stride": 9, "max_len": 8}, "measure.stride=9 must be between 1 and the window's length, 8"),
    ({"max_len": 33}, "measure.max_len=33 is more than the 32 positions"),
])  # fmt: skip
def test_windows_that_cannot_be(words, line):
    with pytest.raises(UserError, match=line):
        SlidingWindow(**words).check(net("gpt"))


def test_a_net_without_learned_positions_reads_longer_windows():
    SlidingWindow(max_len=100).check(net("llama"))


def test_without_overlap_it_is_what_the_task_measures(gpt_run, tmp_path):
    """Rows of a document each are the windows of texts that fit."""
    from test_evaluate import configured, evaluate

    (tmp_path / "a.txt").write_text("\n\n".join(" ".join(TEXT[:n]) for n in (3, 9, 17)), encoding="utf-8")
    words = (f"ckpt={gpt_run}", "data=text", f"data.path={tmp_path / 'a.txt'}")
    theirs = evaluate(configured(*words, "data.packing=single"))
    ours = evaluate(configured(*words, "measure=sliding_window", "measure.stride=64"))
    assert ours.pop("test/tokens") > 3 + 9 + 17
    assert set(ours) == {"test/loss", "test/perplexity", "test/bits_per_byte"}
    assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=1e-5)
    assert lmzoo.load(gpt_run).max_len == 64
