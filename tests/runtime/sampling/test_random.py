"""Philox and the uniform numbers drawn with it: known answers, one number a row in any company, independence
(`runtime/sampling/draw.py`).
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.sampling.draw import philox, uniform

WORDS = st.integers(0, 2**32 - 1)
INT64 = st.integers(0, 2**64 - 1)


def philox_of_integers(counter, key):
    """Salmon et al. (2011), figure 4, in Python integers: an oracle that shares nothing with the arrays."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        high = [(m * c) >> 32 for m, c in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2]))]
        low = [(m * c) % 2**32 for m, c in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2]))]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def on_arrays(counter, key):
    as_words = [tuple(np.array([word], dtype=np.uint64) for word in words) for words in (counter, key)]
    return [int(word[0]) for word in philox(*as_words)]


def chi_square(counts, expected):
    """In standard deviations above its mean, for many degrees of freedom."""
    degrees = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    assert on_arrays(counter, key) == answer


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_philox_on_arrays_equals_philox_on_integers(counter, key):
    assert on_arrays(counter, key) == philox_of_integers(counter, key)


@given(INT64, INT64, INT64)
def test_a_uniform_is_the_first_53_bits_under_seed_sample_and_position(seed, sample, position):
    low, high = 2**32 - 1, 32
    words = philox_of_integers(
        (position & low, position >> high, sample & low, sample >> high), (seed & low, seed >> high)
    )
    value = uniform([seed], [sample], [position])[0]
    assert value == ((words[0] << 32 | words[1]) >> 11) / 2**53
    assert 0.0 <= value < 1.0


@given(st.lists(st.tuples(INT64, INT64, INT64), min_size=1, max_size=20))
def test_a_row_keeps_its_number_in_any_company(triples):
    together = uniform(*zip(*triples, strict=True))
    alone = [uniform(*triple) for triple in triples]
    assert together.tolist() == [float(value) for value in alone]


AXES = {
    "seeds": lambda n: (np.arange(n), 0, 0),
    "samples": lambda n: (7, np.arange(n), 0),
    "positions": lambda n: (7, 0, np.arange(n)),
}


@pytest.mark.parametrize("axis", AXES)
def test_numbers_along_every_axis_are_uniform_and_neighbours_independent(axis):
    values = uniform(*AXES[axis](200_000))
    counts = np.bincount((values * 256).astype(int), minlength=256)
    assert abs(chi_square(counts, len(values) / 256)) < 5
    for lag in (1, 2, 64):
        pairs = (values[:-lag] * 32).astype(int) * 32 + (values[lag:] * 32).astype(int)
        assert abs(chi_square(np.bincount(pairs, minlength=1024), len(pairs) / 1024)) < 5


def test_the_independence_test_sees_a_weak_generator():
    values = (np.arange(200_000) * 0.6180339887498949) % 1.0
    pairs = (values[:-1] * 32).astype(int) * 32 + (values[1:] * 32).astype(int)
    assert chi_square(np.bincount(pairs, minlength=1024), len(pairs) / 1024) > 50


def test_rows_positions_and_samples_of_one_seed_share_no_number():
    seeds, samples, positions = np.meshgrid(np.arange(20), np.arange(20), np.arange(50))
    values = uniform(seeds, samples, positions)
    assert len(np.unique(values)) == values.size
