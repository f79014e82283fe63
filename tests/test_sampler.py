import numpy as np
import pytest

from lmzoo.data import sampler
from lmzoo.data.sampler import Alike, Batches, Shuffled, Windows, permute, split_batch
from lmzoo.errors import UserError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 64, 1000, 1024, 10**6 + 3])
def test_permutation_is_a_bijection(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, (0, 0))), np.arange(n))


@pytest.mark.parametrize("n", [10**12, 2**40 + 1, 2**62])
def test_permutation_of_huge_sizes_stays_inside_and_never_repeats(n):
    index = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000), n // 2 + np.arange(50_000)])
    sent = permute(index, n, (1, 2))
    assert sent.min() >= 0 and sent.max() < n and len(np.unique(sent)) == len(index)
    assert abs(sent.mean() / n - 0.5) < 5 * 12**-0.5 / len(index) ** 0.5  # uniform: five standard errors


def test_permutation_depends_on_the_key_and_on_nothing_else():
    n, index = 1000, np.arange(1000)
    first = permute(index, n, (0, 0))
    assert np.array_equal(permute(index[::-1], n, (0, 0)), first[::-1])  # element by element
    for key in ((0, 1), (1, 0), (2**63, 0)):
        assert (permute(index, n, key) == first).mean() < 0.02


def test_permutation_looks_random():
    """Over keys, where an element is sent is uniform, and neighbours are sent independently of each other."""
    sent = np.array([permute(np.arange(10), 10, (key,)) for key in range(5000)])
    counts = np.array([[(sent[:, i] == j).sum() for j in range(10)] for i in range(10)])
    chi2 = ((counts - 500) ** 2 / 500).sum()
    assert 40 < chi2 < 150  # 81 degrees of freedom: mean 81, standard deviation 13
    steps = np.diff(permute(np.arange(100_000), 100_000, (3,)))
    assert abs(np.mean(steps > 0) - 0.5) < 0.01 and (np.abs(steps) < 10).mean() < 0.001


def rows(windows, steps):
    return [[micro.rows.tolist() for micro in windows.window(step) if not micro.filler] for step in steps]


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order():
    windows = Windows(Shuffled(23, seed=0), batch_size=8, micro_batch_size=3)
    assert len(windows) == 3
    epochs = [sum(sum(rows(windows, range(e * 3, e * 3 + 3)), []), []) for e in range(3)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    epochs = [np.concatenate([micro.epochs for micro in windows.window(step)]).tolist() for step in range(7)]
    assert epochs == [[step // 3] * (7 if step % 3 == 2 else 8) for step in range(7)]
    assert [list(map(len, step)) for step in rows(windows, range(3))] == [[3, 3, 2], [3, 3, 2], [3, 3, 1]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_ranks_read_the_same_steps_and_equally_many_micro_batches(world):
    alone = Windows(Shuffled(23, 5), 8, 2)
    ranks = [Windows(Shuffled(23, 5), 8, 2, rank=rank, world=world) for rank in range(world)]
    for step in range(7):
        shares = [rank.window(step) for rank in ranks]
        assert len({len(share) for share in shares}) == 1
        real = sorted((m for share in shares for m in share if not m.filler), key=lambda micro: micro.number)
        expected = alone.window(step)
        assert [m.number for m in real] == [m.number for m in expected]
        assert all(np.array_equal(a.rows, b.rows) for a, b in zip(real, expected, strict=True))
        assert all(m.number % world == rank for rank, share in enumerate(shares) for m in share)


def test_iteration_begins_at_the_step_and_ends_with_the_epoch():
    windows = Windows(Shuffled(23, 0), 8, 8)
    windows.step = 4
    assert [window[0].rows.tolist() for window in windows] == [rows(windows, [step])[0][0] for step in (4, 5)]
    windows.step = 6
    assert len(list(windows)) == 3


@pytest.mark.parametrize("n", [1000, 10**6 + 3, 10**12])
def test_far_steps_cost_no_more(monkeypatch, n):
    """Numbers that go through the network in ten steps: about as many from step 10^9 as from step 10."""
    sent, network = [], sampler._feistel
    monkeypatch.setattr(sampler, "_feistel", lambda value, *rest: (sent.append(len(value)), network(value, *rest))[1])
    windows, work = Windows(Shuffled(n, 0), 32, 32), []
    for first in (10, 10**9):
        sent.clear()
        windows.step = first
        rows = [next(iter(windows))[0].rows for windows.step in range(first, first + 10)]
        assert all(len(row) in (32, n % 32) and row.max() < n for row in rows)
        work.append(sum(sent))
    assert 320 - 32 < min(work) and max(work) < 4 * 320


def lengths(rows):
    """A length for each row that nothing else tells."""
    return rows * 37 % 101


@pytest.mark.parametrize("n", [7, 23, 1000, 1025])
def test_rows_of_like_length_are_each_read_once_in_an_epoch(n):
    order, plain = Alike(n, 5, lengths), Shuffled(n, 5)
    steps = -(-n // 8)
    for epoch in range(2):
        read, expected = ([one.read(step, 8) for step in range(epoch * steps, epoch * steps + steps)]
                          for one in (order, plain))
        assert [len(rows) for rows, _ in read] == [len(rows) for rows, _ in expected]
        assert sorted(np.concatenate([rows for rows, _ in read])) == list(range(n))
        assert all((epochs == epoch).all() and len(epochs) == len(rows) for rows, epochs in read)
    steps = [order.read(step, 8)[0].tolist() for step in (40, 3, 77, 3)]  # a function of the step alone
    assert steps == [Alike(n, 5, lengths).read(step, 8)[0].tolist() for step in (40, 3, 77, 3)]


def test_rows_of_like_length_are_dealt_out_within_an_eighth_of_an_epoch():
    """1000 rows by 8 are 125 steps: stretches of 15, in each of which the steps' lengths do not overlap."""
    order, plain = Alike(1000, 5, lengths), Shuffled(1000, 5)
    for begin in range(0, 125, 15):
        stretch = range(begin, min(125, begin + 15))
        own = [order.read(step, 8)[0] for step in stretch]
        assert set(np.concatenate(own)) == {row for step in stretch for row in plain.read(step, 8)[0]}
        found = sorted((lengths(rows).min(), lengths(rows).max()) for rows in own)
        assert all(longest <= shortest for (_, longest), (shortest, _) in zip(found, found[1:], strict=False))
    shortest = [lengths(order.read(step, 8)[0]).min() for step in range(15)]
    assert shortest != sorted(shortest)  # the steps of a stretch are shuffled
    few = Alike(127, 5, lengths)  # of 15 full steps an eighth is one: nothing to deal out
    assert all(np.array_equal(few.read(step, 8)[0], Shuffled(127, 5).read(step, 8)[0]) for step in range(16))


def test_rows_seen_are_those_that_were_read():
    order = Shuffled(23, 0)
    read = [len(order.read(step, 8)[0]) for step in range(10)]
    assert [order.seen(steps, 8).tolist() for steps in range(10)] == [[sum(read[:steps])] for steps in range(10)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_reads_each_row_once(world):
    shares = [list(Batches(np.arange(10), 3, rank, world)) for rank in range(world)]
    n_each = len(Batches(np.arange(10), 3, 0, world))
    assert [len(share) for share in shares] == world * [n_each] == world * [-(-4 // world)]
    batches = sorted((batch for share in shares for batch in share if not batch.filler), key=lambda b: b.number)
    assert [batch.rows.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_splitting_a_batch():
    assert split_batch(32, 8, 1) == 8
    assert [split_batch(32, None, world) for world in (1, 2, 3, 4, 64)] == [32, 16, 8, 8, 1]
    with pytest.raises(UserError, match="data.batch_size=32 is not divisible by data.micro_batch_size=12: "
                                        "set data.micro_batch_size=8 or 16, or data.batch_size=36"):
        split_batch(32, 12, 1)
    with pytest.raises(UserError, match="set data.micro_batch_size=32, or data.batch_size=40"):
        split_batch(32, 40, 1)
    for size in (0, -1, "auto", 2.5):
        with pytest.raises(UserError, match=f"data.micro_batch_size={size!r} is not a positive number"):
            split_batch(32, size, 1)
    with pytest.raises(UserError, match="data.batch_size=0"):
        split_batch(0, None, 1)


def test_a_rank_beyond_the_last_batch_reads_a_filler():
    shares = [list(Batches(np.arange(5), 3, rank, 4)) for rank in range(4)]
    assert [[(micro.rows.tolist(), micro.filler) for micro in share] for share in shares] == [
        [([0, 1, 2], False)], [([3, 4], False)], [([0, 1, 2], True)], [([0, 1, 2], True)]]
