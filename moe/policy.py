"""Which held expert gives up its slot for one that has just arrived. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..offload.stream.lane import ShardKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Weight of the newest pass in an expert's probability: the last 35 passes make up half of it.
_NEWEST = 0.02
# An expert is evicted only where that raises the probability of a hit by this much: a smaller difference may be noise.
_MARGIN = 0.05
# The fraction of all slots that may be swapped in one pass: each swap costs a copy within memory.
_SWAP_FRACTION = 0.125


class Popular:
    """Holds the experts that passes want most often, whatever their layer: each hit saves one read.

    `probabilities` [E] by layer are the estimated probabilities that a pass wants each expert; they are updated with
    every pass.
    """

    def __init__(
        self,
        held: Iterable[ShardKey],
        nbytes: Mapping[int, int],
        probabilities: Mapping[int, npt.NDArray[np.float64]],
    ) -> None:
        """`nbytes` is an expert's size by layer."""
        self._held = set(held)
        self._nbytes = nbytes
        self._probabilities = probabilities
        self._leaving: dict[int, deque[ShardKey]] = {}

    def begin_pass(self) -> None:
        """Marks the least popular experts as the ones that this pass may evict."""
        ordered = sorted(self._held, key=self._probability)[: max(1, int(len(self._held) * _SWAP_FRACTION))]
        self._leaving = {size: deque() for size in self._nbytes.values()}
        for key in ordered:
            self._leaving[self._nbytes[key.layer]].append(key)

    def observe(self, layer: int, wanted: Sequence[int]) -> None:
        """A layer of the pass wants these experts, held or not. Called before any of them takes a slot."""
        probabilities = self._probabilities[layer]
        probabilities *= 1.0 - _NEWEST
        probabilities[list(wanted)] += _NEWEST

    def victim(self, entering: ShardKey, may_leave: Callable[[ShardKey], bool]) -> ShardKey | None:
        """The held expert that is evicted for `entering`, which has just arrived and is held from then on.

        Returns None where `entering` gets no slot.
        """
        leaving = self._leaving.get(self._nbytes[entering.layer], deque())
        found = next((key for key in leaving if may_leave(key)), None)
        if found is None or self._probability(entering) < self._probability(found) + _MARGIN:
            return None
        leaving.remove(found)
        self._held.remove(found)
        self._held.add(entering)
        return found

    def _probability(self, key: ShardKey) -> float:
        return float(self._probabilities[key.layer][key.expert])
