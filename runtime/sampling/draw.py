"""The sampler's input and output for one row of a pass, and the row's random number. Computes with no tensor.

The random number of a token is a pure function of its seed, sample and position, without state to restore.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .params import SequenceSampling, TokenLogprob

if TYPE_CHECKING:
    import torch


class TokenHistory:
    """Distinct tokens of prompt and output, with their counts in the output; 12 bytes each.

    Only sequences with penalties have one. A dictionary over every prompt would take ten times the memory, so prompt
    tokens are found by bisection, and only tokens of the output have a dictionary entry.
    """

    __slots__ = ("_counts", "_ids", "_num_prompt", "_slots")

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._ids = array("q", sorted(set(prompt_ids)))
        self._num_prompt = len(self._ids)
        self._counts = array("i", bytes(4 * self._num_prompt))
        self._slots: dict[int, int] = {}

    def append(self, token_id: int) -> None:
        """Counts one token of the output."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._new_slot(token_id)
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """A copy of the N distinct tokens: prompt tokens in ascending order, then new ones in order of appearance."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def counts(self) -> NDArray[np.int32]:
        """A copy of the counts [N] of `ids` in the output; 0 for tokens of the prompt alone."""
        return np.array(self._counts, dtype=np.int32)

    def _new_slot(self, token_id: int) -> int:
        slot = bisect_left(self._ids, token_id, hi=self._num_prompt)
        if slot < self._num_prompt and self._ids[slot] == token_id:
            return slot
        self._ids.append(token_id)
        self._counts.append(0)
        return len(self._ids) - 1


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's settings and its position in its own random stream.

    `sample` distinguishes the continuations of one prompt; `position` counts the tokens generated so far.
    `history` holds prompt and output so far; it is required if `params.penalised`. `forbidden` tokens are never drawn;
    `forced`, if not None, replaces the token that would be drawn.
    """

    params: SequenceSampling
    sample: int
    position: int
    history: TokenHistory | None = None
    forbidden: tuple[int, ...] = ()
    forced: int | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether the row's token is that of the first largest logit, without changes to the logits."""
        return self.params.greedy and not self.biased

    @property
    def biased(self) -> bool:
        """Whether logits of the row are changed before its token is drawn."""
        return self.params.penalised or bool(self.params.logit_bias or self.forbidden)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [B], `NO_TOKEN` where a row's logits were broken; `logprobs` by row, for rows that want them.

    `scores` are of prompt tokens, in the order of the batch; None where logits were broken. `behind` are the logits
    [D, V] behind drafted tokens, from which nothing was drawn yet.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprob]
    scores: tuple[TokenLogprob | None, ...] = ()
    behind: torch.Tensor | None = None


# 32-bit words are kept in 64-bit integers, where the product of two of them cannot overflow.
Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def uniform(seeds: ArrayLike, samples: ArrayLike, positions: ArrayLike) -> NDArray[np.float64]:
    """Multiples of 2**-53 in [0, 1), one per row; the arguments are integers in [0, 2**64), broadcast together.

    The seed is the key of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
    position and sample are its counter: no two triples share an input.
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
