"""One random number per (seed, sample, position): a pure function of these three, without state to restore.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

# 32-bit words are kept in 64-bit integers, where the product of two of them cannot overflow.
Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def uniform(seeds: ArrayLike, samples: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Multiples of 2**-53 in [0, 1), one per row; the arguments are integers in [0, 2**64), broadcast together.

    The seed is Philox's key, position and sample are its counter: no two triples share an input.
    """
    words = philox((*_split(positions), *_split(samples)), _split(seeds))
    bits: Words = (words[0] << _HALF | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """The four random words of a counter of four words under a key of two; a bijection for every key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> _HALF) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _split(values: ArrayLike) -> tuple[Words, Words]:
    """The low and the high 32-bit word of each value."""
    whole = np.asarray(values, dtype=np.uint64)
    return whole & _LOW, whole >> _HALF
