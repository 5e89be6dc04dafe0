"""Which tokens a sequence has seen, and how often it produced them. Knows no logit and no penalty."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Distinct tokens of prompt and output, with output counts; 12 bytes each, whatever the vocabulary.

    Only sequences with penalties carry one: a dictionary over every prompt would cost ten times as much,
    so prompt tokens are found by bisection, and only tokens of the output have a dictionary entry.
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
        """[N] distinct tokens, a copy: prompt tokens in ascending order, then new ones as they came."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def counts(self) -> NDArray[np.int32]:
        """[N] how often the output holds each of `ids`, a copy; 0 for tokens of the prompt alone."""
        return np.array(self._counts, dtype=np.int32)

    def _new_slot(self, token_id: int) -> int:
        slot = bisect_left(self._ids, token_id, hi=self._num_prompt)
        if slot < self._num_prompt and self._ids[slot] == token_id:
            return slot
        self._ids.append(token_id)
        self._counts.append(0)
        return len(self._ids) - 1
