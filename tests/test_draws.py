import numpy as np
import pytest

from lmzoo.draws import choose, draw, mix, uniform


def test_mixing_is_that_of_splitmix64():
    """The first outputs of the reference implementation for the seed 1234567."""
    state = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_belong_to_key_and_place():
    keys = np.array([[0, 0, 7], [0, 7, 0], [7, 0, 0], [0, 0, 8], [2**32 - 1, 0, 7]])
    numbers = draw(keys, 100, 3)
    assert len(np.unique(numbers)) == numbers.size
    assert np.array_equal(draw(keys[2:3], 40, 3)[0], numbers[2, :40])


def test_numbers_are_uniform_and_those_of_neighbours_independent():
    """4000 keys that count up: means, and correlations of neighbouring places and keys, within five standard errors."""
    keys = np.stack([np.zeros(4000, int), np.zeros(4000, int), np.arange(4000)], 1)
    x = uniform(draw(keys, 50)) - 0.5
    assert x.min() >= -0.5 and x.max() < 0.5
    assert abs(x.mean(0)).max() < 5 * (1 / 12 / 4000) ** 0.5
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1])):
        assert abs((a * b).mean()) < 5 / 12 / a.size**0.5
    counts = np.histogram(x, 100)[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 5 * (2 * 99) ** 0.5


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_exactly_so_many_are_chosen_each_set_equally_often(count):
    among = np.tile([True, False, True, True, True, True], (6000, 1))
    chosen = choose(draw(np.arange(6000)[:, None], 6), among, np.full(6000, count))
    assert (chosen.sum(1) == count).all() and not chosen[:, 1].any()
    share = count / 5
    assert abs(chosen[:, among[0]].mean(0) - share).max() <= 4 * (share * (1 - share) / 6000) ** 0.5
    if count == 3:  # pairs too: 3/5 * 2/4
        assert abs((chosen[:, 0] & chosen[:, 2]).mean() - 0.3) < 4 * (0.3 * 0.7 / 6000) ** 0.5
