"""Beam search against all rows there are, and against hand-worked beams."""

import itertools

import pytest
import torch

from lmzoo.decoding import generate, search
from lmzoo.decoding.beams import Beams
from lmzoo.errors import UserError
from models import ids, make


def log_probability(net, row, new, start=None):
    """Of the ids ``new`` behind a row (1, T), by one full forward."""
    new = torch.tensor([new])
    with torch.no_grad():
        first = row if start is None else torch.tensor([[start]])
        rows = torch.cat([first, new], 1)
        logits = net(rows) if start is None else net(row, None, rows)
    scores = logits.log_softmax(-1)[0, first.shape[1] - 1 : -1]
    return scores.gather(1, new.T).sum().item()


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_beams_enough_for_all_rows_find_the_best_ones(kind, length_penalty):
    """Vocabulary 5, eos 1, up to 3 tokens: 5 + 4 * 5 + 16 * 5 rows, of which those that end or are full count."""
    net, row, start = make(kind, vocab_size=5), ids(1, 3, vocab_size=5), 0 if kind == "t5" else None
    others = [0, 2, 3, 4]
    rows = [[*body, 1] for n in range(3) for body in itertools.product(others, repeat=n)]
    rows += [list(body) for body in itertools.product(others, repeat=3)]
    totals = {tuple(new): log_probability(net, row, new, start) for new in rows}
    best = sorted(totals, key=lambda new: totals[new] / len(new) ** length_penalty, reverse=True)
    beams = Beams(1, 40, 3, length_penalty, eos=1, device=row.device)
    scores = None
    for step in range(3):
        befores = [[]] * 40 if step == 0 else beams.running[0, :, :step].tolist()
        scores = torch.stack([next_scores(net, row, before, start) for before in befores])
        beams.advance(scores)
    found, sums = beams.best(5)
    for new, total, expected in zip(found[0].tolist(), sums[0].tolist(), best, strict=False):
        new = new[: new.index(1) + 1] if 1 in new else new
        assert new == list(expected) and total == pytest.approx(totals[expected], abs=1e-4)


def next_scores(net, row, before, start):
    before = torch.tensor([before], dtype=torch.long)
    with torch.no_grad():
        if start is None:
            return net(torch.cat([row, before], 1))[0, -1].log_softmax(-1)
        return net(row, None, torch.cat([torch.tensor([[start]]), before], 1))[0, -1].log_softmax(-1)


def test_a_beam_by_hand():
    """Two beams, tokens a b and eos. After a (.6) or b (.4) a's best is .3, b's best .9: b wins in the second step."""
    beams = Beams(1, 2, 2, length_penalty=0.0, eos=2, device="cpu")
    token, rows = beams.advance(torch.tensor([[0.6, 0.4, 0.0]] * 2).log())
    assert token.tolist() == [0, 1] and rows.tolist() == [0, 0] and not beams.done()
    beams.advance(torch.tensor([[0.3, 0.3, 0.4], [0.05, 0.9, 0.05]]).log())
    found, totals = beams.best(2)
    assert beams.done() and found.tolist() == [[[1, 1], [0, 2]]]
    assert totals.exp().tolist()[0] == pytest.approx([0.36, 0.24])


def test_a_prompt_is_done_when_no_running_row_can_come_out_above_the_ended_ones():
    beams = Beams(1, 1, 9, length_penalty=0.0, eos=2, device="cpu")
    beams.advance(torch.tensor([[0.2, 0.1, 0.7]]).log())
    assert beams.done() and beams.best(1)[0].tolist() == [[[2]]]
    beams = Beams(1, 2, 9, length_penalty=0.0, eos=2, device="cpu")
    beams.advance(torch.tensor([[0.2, 0.1, 0.7]] * 2).log())
    assert not beams.done()  # one of two has ended
    beams.advance(torch.tensor([[0.05, 0.05, 0.9], [0.3, 0.3, 0.4]]).log())
    assert beams.done() and beams.best(2)[0].tolist() == [[[2, 2], [0, 2]]]


@pytest.mark.parametrize("kind", ["gpt", "llama", "t5"])
def test_log_probabilities_are_those_of_the_full_forward(kind):
    net, rows, start = make(kind), ids(2, 5), 3 if kind == "t5" else None
    found, totals = search(net, rows, None, 6, n_beams=3, n_best=3, start=start)
    for row, best, sums in zip(rows, found, totals.tolist(), strict=True):
        for one, total in zip(best, sums, strict=True):
            new = one[5 if start is None else 1 :].tolist()
            assert log_probability(net, row[None], new, start) == pytest.approx(total, abs=1e-4)
    assert not totals.requires_grad and not totals.is_inference() and not found.is_inference()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["gpt", "llama", "t5"])
def test_a_batch_gives_what_its_rows_give_alone(kind, side):
    net, start = make(kind), 3 if kind == "t5" else None
    rows = [ids(1, length, seed=length) for length in (7, 3, 1)]
    words = {"start": start, "eos": 5, "n_beams": 3, "n_best": 2, "length_penalty": 0.5}
    batch, mask = torch.full((3, 7), 9), torch.zeros(3, 7, dtype=torch.long)
    for i, row in enumerate(rows):
        columns = slice(7 - row.shape[1], 7) if side == "left" else slice(0, row.shape[1])
        batch[i, columns], mask[i, columns] = row[0], 1
    found, totals = search(net, batch, mask, 8, **words)
    for i, row in enumerate(rows):
        alone, sums = search(net, row, None, 8, **words)
        new = alone[0, :, row.shape[1] if start is None else 1 :].tolist()
        together = found[i, :, 7 if start is None else 1 :].tolist()
        assert [line[: len(new[0])] for line in together] == new
        assert totals[i].tolist() == pytest.approx(sums[0].tolist(), abs=1e-4)


def test_generate_with_beams_is_the_best_of_search():
    net, rows = make("gpt"), ids(3, 4)
    found, _ = search(net, rows, None, 6, n_beams=4, n_best=2, eos=7)
    best = generate(net, rows, None, 6, n_beams=4, eos=7)
    assert best.tolist() == found[:, 0, : best.shape[1]].tolist()


def test_forbidden_ids_never_come_out():
    net, rows = make("gpt"), ids(4, 4)
    likeliest = search(net, rows, None, 6, n_beams=3)[0][..., 4:].unique().tolist()
    got = search(net, rows, None, 6, n_beams=3, forbidden=likeliest)[0][..., 4:]
    assert not set(likeliest) & set(got.unique().tolist())


def test_refusals():
    net, row = make("gpt"), ids(1, 4)
    for words, line in (({"n_best": 5}, "n_best=5"), ({"n_beams": 51}, "n_beams=51"), ({"n_beams": 0}, "n_beams=0")):
        with pytest.raises(UserError, match=line):
            search(net, row, **words)
    with pytest.raises(UserError, match="leave out n_beams"):
        generate(net, row, n_beams=2, stop=["a"])
