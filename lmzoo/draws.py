"""Random numbers without a state: each is a hash of a key and a place, the same whoever asks for it and in which order.

SplitMix64 (Steele et al. 2014) as a counter-based generator: its finaliser is a bijection on 64 bits and its increment
is odd, so that no two of one key's numbers are equal, and "the k smallest of n" are k exactly.
"""

import numpy as np

INCREMENT = np.uint64(0x9E3779B97F4A7C15)
LARGEST = np.uint64(2**64 - 1)


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of 64 bits, one to one: the finaliser of SplitMix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def draw(keys: np.ndarray, *shape: int) -> np.ndarray:
    """uint64 (B, *shape) from keys (B, any number of integers). A longer shape[0] has the same numbers first."""
    state = np.zeros(len(keys), np.uint64)
    for column in np.asarray(keys, dtype=np.uint64).T:
        state = mix(state ^ column) + INCREMENT
    counter = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * INCREMENT
    return mix(state[:, None] + counter).reshape(len(keys), *shape)


def uniform(numbers: np.ndarray) -> np.ndarray:
    """Drawn numbers as float64 in [0, 1)."""
    return (numbers >> np.uint64(11)) * 2.0**-53


def choose(numbers: np.ndarray, among: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of each row's places `among` (B, n) exactly counts (B,), each set of them equally likely: bool (B, n)."""
    numbers = np.where(among, numbers, LARGEST)
    last = np.take_along_axis(np.sort(numbers, 1), np.maximum(counts - 1, 0)[:, None], 1)
    return among & (numbers <= last) & (counts > 0)[:, None]
