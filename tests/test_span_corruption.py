"""Span corruption: the paper's example and lengths, and that the target's spans restore the row, always."""

from functools import partial

import numpy as np
import pytest
import torch
from lmzoo.tasks.span_corruption import Corruption, SpanCorruption, segments
from torch.nn import functional as F

import models
from lmzoo.draws import draw
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_bpe, train_unigram

PAD, EOS, START = 0, 1, 0
SENTINELS = list(range(999, 899, -1))  # <extra_id_0> is 999, as in T5 the last id


def corruption(kind=Corruption, **settings):
    usual = {"sentinels": SENTINELS, "start": START, "eos": EOS, "pad": PAD, "density": 0.15, "mean_span": 3.0}
    return kind(**usual | settings)


def example(tokens, key=(0, 0, 0)):
    tokens = np.array(tokens, dtype=np.int64)
    return {"tokens": tokens, "document_ids": np.zeros(len(tokens), np.int32), "key": key}


def restore(inputs, target):
    """The row, from both: each sentinel of the input gives way to what follows it in the target."""
    spans, current = {}, None
    for token in target[:-1]:
        if token in SENTINELS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    row = []
    for token in inputs[:-1]:
        row += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return row


def corrupted(collate, row):
    """(input, target) of one row."""
    batch = collate([row])
    return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


class Fixed(Corruption):
    """Noise given by hand."""

    hidden: list[int]

    def noise(self, lengths, keys):
        return np.isin(np.arange(lengths.max()), self.hidden)[None]


def test_the_papers_example():
    """Figure 2: `Thank you for inviting me to your party last week .` with `for inviting` and `last` cut out."""
    thank, you, for_, inviting, me, to, your, party, last, week, stop = range(10, 21)
    collate = corruption(Fixed)
    collate.hidden = [2, 3, 8]
    batch = collate([example([thank, you, for_, inviting, me, to, your, party, last, week, stop])])
    assert batch["input_ids"].tolist() == [[thank, you, 999, me, to, your, party, 998, week, stop, EOS]]
    assert batch["labels"].tolist() == [[999, for_, inviting, 998, last, EOS]]
    assert batch["decoder_input_ids"].tolist() == [[START, 999, for_, inviting, 998, last]]
    assert batch.keys() == {"input_ids", "decoder_input_ids", "labels"}


def test_span_at_the_first_and_at_the_last_token():
    collate = corruption(Fixed)
    collate.hidden = [0, 3]
    batch = collate([example([10, 11, 12, 13])])
    assert batch["input_ids"].tolist() == [[999, 11, 12, 998, EOS]]
    assert batch["labels"].tolist() == [[999, 10, 998, 13, EOS]]


def test_masks_shift_alike_and_no_ignored_label_reaches_the_decoder():
    batch = corruption()([example(range(10, 30)), example(range(10, 14))])
    labels, fed, mask = batch["labels"], batch["decoder_input_ids"], batch["decoder_attention_mask"]
    for row, length in ((0, 3 + 1 + 1), (1, 1 + 1 + 1)):  # noise, spans, eos
        assert mask[row].tolist() == [1] * length + [0] * (5 - length)
        assert fed[row, 0] == START
        assert fed[row, 1:length].tolist() == labels[row, : length - 1].tolist()
        assert (fed[row, length:] == PAD).all() and (labels[row, length:] == -100).all()
    assert (batch["input_ids"] >= 0).all() and (fed >= 0).all()
    assert batch["attention_mask"].sum(1).tolist() == [17 + 1 + 1, 3 + 1 + 1]


def test_pad_that_is_a_real_token_stays_one():
    """With pad = eos = start the masks still tell the row's length."""
    batch = corruption(start=1, eos=1, pad=1)([example([1, 10, 1, 1]), example(range(10, 40))])
    assert batch["attention_mask"].sum(1).tolist()[0] == 5
    assert (batch["labels"][0] != -100).sum() == 3


def test_lengths_of_the_paper():
    """T5's own pretraining: 512 tokens of input come of 568, with 114 of target (85 noise tokens in 28 spans)."""
    collate = corruption()
    assert collate.window(512) == (568, 568)
    assert collate.counts(568) == (85, 28)
    assert collate.lengths(568) == (512, 114)


@pytest.mark.parametrize(
    ("n_tokens", "noise", "spans"),
    [(2, 1, 1), (3, 1, 1), (10, 2, 1), (30, 4, 1), (50, 8, 3), (70, 10, 3), (100, 15, 5)],
)
def test_rounding(n_tokens, noise, spans):
    """By hand: round(.15 n) with halves to even (1.5 -> 2, 4.5 -> 4, 7.5 -> 8), then round(noise / 3)."""
    assert corruption().counts(n_tokens) == (noise, spans)


@pytest.mark.parametrize("settings", [{}, {"density": 0.5}, {"mean_span": 1.0}, {"density": 0.5, "mean_span": 2.0}])
def test_rows_come_out_full(settings):
    collate = corruption(**settings)
    for row_length in range(3, 200):
        raw, stride = collate.window(row_length)
        assert raw == stride
        batch = collate([example(range(10, 10 + raw), (0, 0, row_length))])
        assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == collate.lengths(raw)
        assert batch["input_ids"].shape[1] == row_length
        assert "attention_mask" not in batch and "decoder_attention_mask" not in batch


@pytest.mark.parametrize("anywhere", [False, True])
def test_the_spans_restore_the_row(anywhere):
    collate = corruption(anywhere=anywhere)
    for n_tokens in [*range(2, 40), 200]:
        for sample in range(10):
            row = example(range(10, 10 + n_tokens), (3, 1, sample))
            inputs, target = corrupted(collate, row)
            assert restore(inputs, target) == row["tokens"].tolist()
            n_spans = collate.counts(n_tokens)[1]
            assert [t for t in inputs if t in SENTINELS] == SENTINELS[:n_spans]
            assert [t for t in target if t in SENTINELS] == SENTINELS[:n_spans]
            assert inputs[-1] == target[-1] == EOS


def test_where_spans_begin():
    """T5's noise ends with the row and leaves the first token; with `anywhere` both ends may be either."""
    ends = {anywhere: set() for anywhere in (False, True)}
    for anywhere, seen in ends.items():
        for sample in range(200):
            noise = corruption(anywhere=anywhere).noise(np.array([20]), np.array([[0, 0, sample]]))[0]
            assert noise.sum() == 3
            seen.add((bool(noise[0]), bool(noise[-1])))
    assert ends[False] == {(False, True)}
    assert {(True, False), (False, True), (False, False)} <= ends[True]


def test_two_tokens():
    assert corrupted(corruption(), example([10, 11])) == ([10, 999, EOS], [999, 11, EOS])
    found = {corrupted(corruption(anywhere=True), example([10, 11], (0, 0, s)))[1][1] for s in range(30)}
    assert found == {10, 11}


@pytest.mark.parametrize("tokens", [[], [10]])
def test_fewer_tokens_make_a_row_without_targets(tokens):
    batch = corruption()([example(tokens), example([10, 11])])
    assert batch["input_ids"][0].tolist() == [*tokens, EOS, *[PAD] * (2 - len(tokens))]
    assert (batch["labels"][0] == -100).all()
    assert batch["decoder_input_ids"][0].tolist() == [START, PAD, PAD]
    assert batch["decoder_attention_mask"][0].tolist() == [1, 0, 0]


def test_partitions_are_equally_likely():
    """5 items in 3 segments: the six compositions of 5, each 200 times of 1200 within four standard deviations."""
    numbers = draw(np.arange(1200)[:, None], 6)  # two places more than there are
    segment = segments(np.full(1200, 5), np.full(1200, 3), numbers)
    assert (segment[:, 5:] > 2).all()
    lengths = [np.bincount(row) for row in segment[:, :5]]
    found, counts = np.unique(lengths, axis=0, return_counts=True)
    assert found.tolist() == [[1, 1, 3], [1, 2, 2], [1, 3, 1], [2, 1, 2], [2, 2, 1], [3, 1, 1]]
    assert abs(counts - 200).max() < 4 * (1200 / 6 * 5 / 6) ** 0.5


def test_noise_belongs_to_seed_epoch_and_sample():
    def inputs(*key, others=()):
        return corruption()([*others, example(range(10, 110), key)])["input_ids"][-1].tolist()

    one = inputs(0, 0, 7)
    assert inputs(0, 0, 7, others=[example(range(100, 200), (0, 0, 1)), example([10, 11], (0, 0, 2))]) == one
    different = [one, inputs(1, 0, 7), inputs(0, 1, 7), inputs(0, 0, 8), inputs(7, 0, 0), inputs(0, 7, 0)]
    assert len({tuple(row) for row in different}) == len(different)


def test_rows_of_a_batch_are_what_they_are_alone():
    rows = [example(range(10, 10 + n), (0, 3, n)) for n in (100, 1, 2, 57, 0, 30)]
    for anywhere in (False, True):
        collate = corruption(anywhere=anywhere)
        together = collate(rows)
        for i, row in enumerate(rows):
            alone = collate([row])
            for name in ("input_ids", "labels", "decoder_input_ids"):
                n = alone[name].shape[1]
                assert torch.equal(together[name][i, :n], alone[name][0])
                assert (together[name][i, n:] == (-100 if name == "labels" else PAD)).all()


def test_too_few_sentinels_are_refused_at_the_start():
    few = corruption(sentinels=SENTINELS[:5])
    few.window(90)
    with pytest.raises(UserError, match=r"512 tokens hold 28 spans, but the tokenizer has 5 sentinels"):
        few.window(512)


@pytest.mark.parametrize(
    ("settings", "message"), [({"density": 0.0}, "density=0.0"), ({"density": 1.0}, "density=1.0"),
                              ({"mean_span": 0.5}, "mean_span=0.5")]
)  # fmt: skip
def test_settings_that_make_no_spans_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        corruption(**settings)


def test_row_length_below_the_smallest_corrupted_text_is_refused():
    with pytest.raises(UserError, match="data.row_length=2 "):
        corruption().window(2)


TOKENIZER = byte([], 400, sentinels=4)
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "optimizer": partial(torch.optim.AdamW)}


def task(tokenizer=TOKENIZER, **settings):
    net = models.make("t5", vocab_size=len(TOKENIZER), max_len=64)
    return SpanCorruption(net, tokenizer, OPTIM, lambda step, total: 1.0, **settings)


def text(words, sample=0):
    return example(TOKENIZER.encode(words), (0, 0, sample))


def test_loss_is_torchs_and_no_ignored_label_reaches_an_embedding():
    """The ids that the embedding sees are the encoder's input and the start token with the target shifted by one."""
    model, seen = task().eval(), []
    model.net.embed.tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    batch = model.collator([text("import this and that"), text("ab", 1)])
    sums = model.loss(batch)
    assert len(seen) == 2
    assert torch.equal(seen[0], batch["input_ids"])
    fed, labels = seen[1], batch["labels"]
    assert (fed >= 0).all() and (fed[:, 0] == TOKENIZER.start).all()
    assert torch.equal(fed[:, 1:][labels[:, 1:] != -100], labels[:, :-1][labels[:, 1:] != -100])
    expected = 0
    for row in (text("import this and that"), text("ab", 1)):  # alone, without padding
        alone = model.collator([row])
        logits = model.net(alone["input_ids"], decoder_input_ids=alone["decoder_input_ids"])
        expected += F.cross_entropy(logits[0], alone["labels"][0], reduction="sum")
    torch.testing.assert_close(sums["loss"], expected)


def test_sentinels_are_those_of_the_tokenizer():
    """Also with t5's own kind, whose vocabulary ends with them; nothing is computed from a size."""
    for tokenizer in (TOKENIZER, train_unigram(["some text of a few words"] * 9, 500)):
        sentinels = SpanCorruption(models.make("t5"), tokenizer, OPTIM, None).collator.sentinels
        assert [tokenizer.token(id) for id in sentinels.tolist()[:3]] == [f"<extra_id_{i}>" for i in range(3)]


def test_one_repeated_batch_is_learned_and_shown():
    """Then the two blanks are filled with what stood there."""
    model = task(prompts=["ab{}ef{}i"]).train()
    first, second = TOKENIZER.sentinels[:2]
    inputs = [*TOKENIZER.encode("ab"), first, *TOKENIZER.encode("ef"), second, *TOKENIZER.encode("i"), TOKENIZER.eos]
    target = [first, *TOKENIZER.encode("cd"), second, *TOKENIZER.encode("gh"), TOKENIZER.eos]
    batch = {"input_ids": torch.tensor([inputs]), "labels": torch.tensor([target]),
             "decoder_input_ids": torch.tensor([[TOKENIZER.start, *target[:-1]]])}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        sums = model.loss(batch)
        (sums["loss"] / sums["targets"]).backward()
        optimizer.step()
    assert sums["loss"] / sums["targets"] < 0.02
    assert model.show().splitlines()[1:] == ["  ab[cd]ef[gh]i"]
    assert model.net.training


@pytest.mark.parametrize("packing", ["isolate", "fit"])
def test_packing_that_keeps_documents_apart_is_refused(packing):
    with pytest.raises(UserError, match=f"data.packing={packing}: spans of span corruption cross documents"):
        task(packing=packing)


def test_tokenizer_without_sentinels_is_refused():
    with pytest.raises(UserError, match="task=span_corruption needs a sentinels token"):
        task(train_bpe(["some text of a few words"] * 9, 300))
