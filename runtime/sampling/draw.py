"""The sampler's input and output for one row of a pass. Knows no tensor."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .params import SamplingParams, TokenLogprob


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

    params: SamplingParams
    sample: int
    position: int
    history: TokenHistory | None = None
    forbidden: tuple[int, ...] = ()
    forced: int | None = None

    def __post_init__(self) -> None:
        if self.history is None and self.params.penalised:
            raise ValueError("A draw with penalties has no token history; pass the TokenHistory of its sequence.")

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
    """`token_ids` [B], `NO_TOKEN` where a row's logits were broken; `logprobs` by row, for rows that want them."""

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprob]
