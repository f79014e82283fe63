"""Masked language modelling: exact rates, untouched special tokens, whole words, masks that belong to the sample."""

from functools import partial

import numpy as np
import pytest
import torch
from lmzoo.tasks.mlm import MaskedLM, Masking
from torch.nn import functional as F

import models
from lmzoo.errors import UserError
from lmzoo.tokenizer import byte, train_unigram

VOCABULARY, SPECIAL = 50, [0, 1, 2, 3, 4]  # pad, unk, bos, eos, mask
PAD, BOS, EOS, MASK = 0, 2, 3, 4
ORDINARY = ~np.isin(np.arange(VOCABULARY), SPECIAL)


def masking(**settings):
    return Masking(ORDINARY, mask=MASK, pad=PAD, **{"rate": 0.15, "masked": 0.8, "random": 0.1} | settings)


def example(tokens, key=(0, 0, 0), **more):
    tokens = np.array(tokens, dtype=np.int64)
    return {"tokens": tokens, "document_ids": np.zeros(len(tokens), np.int32), "key": key, **more}


def texts(n_rows, n_tokens=100, seed=0):
    """Rows `bos t1 .. tn eos` with another eos-bos border in the middle and ordinary tokens elsewhere."""
    rng = np.random.default_rng(seed)
    for sample in range(n_rows):
        tokens = rng.integers(5, VOCABULARY, n_tokens)
        tokens[[0, n_tokens // 2]], tokens[[n_tokens // 2 - 1, -1]] = BOS, EOS
        yield example(tokens, (seed, 0, sample))


def test_by_hand():
    """All three ordinary tokens chosen and masked: labels are what stood there, special tokens are left alone."""
    batch = masking(rate=1.0, masked=1.0, random=0.0)([example([BOS, 11, 12, EOS, BOS, 13, EOS])])
    assert batch["input_ids"].tolist() == [[BOS, MASK, MASK, EOS, BOS, MASK, EOS]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, -100, 13, -100]]
    assert batch.keys() == {"input_ids", "labels"}


def test_kept_tokens_are_targets_too():
    batch = masking(rate=1.0, masked=0.0, random=0.0)([example([BOS, 11, 12, EOS])])
    assert batch["input_ids"].tolist() == [[BOS, 11, 12, EOS]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100]]


def test_padding_is_by_mask_and_never_chosen():
    batch = masking(rate=1.0, masked=1.0, random=0.0)([example([11, 12, 13]), example([14])])
    assert batch["input_ids"].tolist() == [[MASK, MASK, MASK], [MASK, PAD, PAD]]
    assert batch["labels"].tolist() == [[11, 12, 13], [14, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_documents_are_handed_on_where_they_are_kept_apart():
    row = example([11, 12, 13]) | {"document_ids": np.array([0, 0, 1], np.int32)}
    assert masking(isolate=True)([row, example([11])])["document_ids"].tolist() == [[0, 0, 1], [0, -1, -1]]


@pytest.mark.parametrize(
    ("n", "rate", "expected"),
    [(100, 0.15, 15), (7, 0.15, 1), (2, 0.15, 1), (1, 0.15, 1), (20, 0.4, 8), (9, 1.0, 9), (0, 0.15, 0)],
)
def test_number_of_targets_is_exact(n, rate, expected):
    for sample in range(20):
        row = example([BOS, *range(5, 5 + min(n, 45)), *[5] * (n - 45), EOS], (1, 0, sample))
        assert (masking(rate=rate)([row])["labels"] != -100).sum() == expected


def test_special_tokens_are_never_chosen_or_drawn_and_all_others_are():
    rows = list(texts(400))
    batch = masking(rate=0.5, masked=0.0, random=1.0)(rows)
    original = torch.from_numpy(np.stack([row["tokens"] for row in rows]))
    chosen = batch["labels"] != -100
    special = torch.isin(original, torch.tensor(SPECIAL))
    assert not (chosen & special).any()
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert set(batch["input_ids"][chosen].tolist()) == set(range(5, VOCABULARY))
    assert (chosen.sum(0)[~special[0]] > 140).all()  # each position, 200 +- 10 times of 400


def test_80_10_10():
    """Of 400 * 14 chosen tokens: each share within four standard deviations; drawn ones may hit the original."""
    rows = list(texts(400))
    batch = masking()(rows)
    original = torch.from_numpy(np.stack([row["tokens"] for row in rows]))
    chosen = batch["labels"] != -100
    n = chosen.sum().item()
    assert n == 400 * round(0.15 * 96)
    masked = (batch["input_ids"][chosen] == MASK).sum().item()
    kept = (batch["input_ids"][chosen] == original[chosen]).sum().item()
    for count, share in ((masked, 0.8), (kept, 0.1 + 0.1 / 45), (n - masked - kept, 0.1 - 0.1 / 45)):
        assert abs(count - n * share) < 4 * (n * share * (1 - share)) ** 0.5


def test_masks_belong_to_seed_epoch_and_sample():
    tokens = np.arange(5, 50).repeat(2)

    def labels(*key, others=()):
        return masking()([*others, example(tokens, key)])["labels"][-1].tolist()

    one = labels(0, 0, 7)
    assert labels(0, 0, 7) == one
    assert labels(0, 0, 7, others=[example(tokens, (0, 0, 3)), example(tokens[:4], (0, 0, 4))]) == one
    different = [one, labels(1, 0, 7), labels(0, 1, 7), labels(0, 0, 8), labels(7, 0, 0), labels(0, 7, 0)]
    assert len({tuple(row) for row in different}) == len(different)


def test_rows_of_a_batch_are_what_they_are_alone():
    rows = [example(np.resize(np.arange(5, 50), n), (0, 3, n), word_starts=np.arange(n) % 3 == 0) for n in (100, 1, 30)]
    for whole_word in (False, True):
        collate = masking(whole_word=whole_word)
        together = collate(rows)
        for i, row in enumerate(rows):
            alone = collate([row])
            n = alone["labels"].shape[1]
            assert torch.equal(together["labels"][i, :n], alone["labels"][0])
            assert (together["labels"][i, n:] == -100).all()
            assert torch.equal(together["input_ids"][i, :n], alone["input_ids"][0])


def test_whole_words_share_one_decision():
    """Words of 1, 2 and 3 pieces, one of them right after a special token: all pieces are chosen or none, and alike."""
    tokens = [BOS, 10, 11, 12, 13, 14, 15, EOS, BOS, 16, 17, 18]
    starts = [True, True, False, True, False, False, True, True, True, False, True, True]
    words = [(1, 2), (3, 4, 5), (6,), (9,), (10,), (11,)]  # 9 starts no word, but follows a special token
    collate = masking(rate=0.5, masked=0.4, random=0.3, whole_word=True)
    fates, chosen_words = set(), []
    for sample in range(300):
        batch = collate([example(tokens, (0, 0, sample), word_starts=np.array(starts))])
        inputs, labels = batch["input_ids"][0].numpy(), batch["labels"][0].numpy()
        assert (labels[[0, 7, 8]] == -100).all()
        chosen_words.append(0)
        for word in map(list, words):
            chosen, masked = labels[word] != -100, inputs[word] == MASK
            assert chosen.all() or not chosen.any()
            assert masked.all() or not masked.any()
            chosen_words[-1] += chosen[0]
            if len(word) == 3 and chosen[0]:
                kept = (inputs[word] == np.array(tokens)[word]).all()
                fates.add("masked" if masked[0] else "kept" if kept else "drawn")
    assert set(chosen_words) == {3}
    assert fates == {"masked", "kept", "drawn"}


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"rate": 1.5}, {"masked": 0.9, "random": 0.2}, {"random": -0.1}])
def test_shares_that_are_none_are_refused(settings):
    with pytest.raises(UserError, match=f"task.{next(iter(settings))}="):
        masking(**settings)


TOKENIZER = byte([], 400, sentinels=0)
OPTIM = {"lr": 1e-3, "weight_decay": 0.0, "clip_norm": None, "optimizer": partial(torch.optim.AdamW)}


def task(**settings):
    net = models.make("bert", vocab_size=len(TOKENIZER))
    return MaskedLM(net, TOKENIZER, OPTIM, lambda step, total: 1.0, **settings)


def document(text):
    return example(TOKENIZER.document(TOKENIZER.encode(text)))


def test_loss_is_torchs_at_the_masked_positions_only():
    model = task().eval()
    batch = model.collator([document("import this and that"), document("x")])
    seen = []
    model.net.head.register_forward_hook(lambda head, inputs, logits: seen.append(logits.shape))
    sums = model.loss(batch)
    assert seen == [(4, len(TOKENIZER))]  # 15 % of 20 letters, and the one of the second row
    logits = model.net(batch["input_ids"], batch["attention_mask"])
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(sums["loss"], expected)
    assert sums["targets"] == 4


def test_isolated_documents_cost_what_they_cost_alone():
    """Two documents in one row, all of their letters masked."""
    settings = {"rate": 1.0, "masked": 1.0, "random": 0.0}
    model, rows = task(packing="isolate", **settings).eval(), [document("import this"), document("xyz")]
    packed = example(np.concatenate([row["tokens"] for row in rows]))
    packed["document_ids"] = np.repeat([0, 1], [len(row["tokens"]) for row in rows])
    alone = [model.loss(model.collator([row]))["loss"] for row in rows]
    torch.testing.assert_close(model.loss(model.collator([packed]))["loss"], sum(alone))


def test_one_repeated_batch_is_learned_and_shown():
    """With the text's last letter masked; then that letter is the likeliest in its blank."""
    model = task(prompts=["abc{}"]).train()
    ids = TOKENIZER.document(TOKENIZER.encode("abcd"))
    inputs, labels = torch.tensor([ids]), torch.full((1, len(ids)), -100)
    labels[0, 4], inputs[0, 4] = ids[4], TOKENIZER.mask
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss({"input_ids": inputs, "labels": labels})["loss"]
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    prompt, guesses = model.show().splitlines()[1:]
    assert prompt == "  abc____"
    words = guesses.split()
    assert words[0] == "d" and float(words[1]) > 0.9 and len(words) == 6
    assert model.net.training


def test_the_tasks_collator_spares_the_tokenizers_special_tokens():
    collator = task().collator
    assert set(np.flatnonzero(~collator.ordinary)) == TOKENIZER.special_ids
    assert len(collator.ordinary) == len(TOKENIZER)


def test_tokenizer_without_mask_is_refused():
    tokenizer = train_unigram(["some text of a few words"] * 9, 500)
    with pytest.raises(UserError, match="task=mlm needs a mask token"):
        MaskedLM(models.make("bert"), tokenizer, OPTIM, lambda step, total: 1.0)
