"""What names an expert of a model. Torch-free."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class ExpertKey(NamedTuple):
    """Expert `expert` of layer `layer`, as the model counts its layers."""

    layer: int
    expert: int


class HoldPolicy(Protocol):
    def begin_pass(self) -> None: ...

    def saw(self, layer: int, wanted: Sequence[int]) -> None:
        """A layer of the pass wanted these experts, held or not; before any of them takes a slot."""
        ...

    def victim(self, entering: ExpertKey, may_leave: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        """The held expert that leaves for `entering`, which has just arrived; from then on that one is held."""
        ...


class Lru:
    """Every expert that arrives takes the slot of the one that was not wanted for longest.

    What caches do elsewhere. On a scan that is longer than there are slots it never hits.
    """

    def __init__(self, held: Iterable[ExpertKey], nbytes: Mapping[int, int]) -> None:
        """`nbytes` is an expert's size by layer."""
        self._order: OrderedDict[ExpertKey, None] = OrderedDict.fromkeys(held)
        self._nbytes = nbytes

    def begin_pass(self) -> None:
        """Passes mean nothing to it."""

    def saw(self, layer: int, wanted: Sequence[int]) -> None:
        for expert in wanted:
            if (key := ExpertKey(layer, expert)) in self._order:
                self._order.move_to_end(key)

    def victim(self, entering: ExpertKey, may_leave: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        size = self._nbytes[entering.layer]
        found = next((key for key in self._order if self._nbytes[key.layer] == size and may_leave(key)), None)
        if found is not None:
            del self._order[found]
            self._order[entering] = None
        return found


# Of what a pass wants today, how much tells about tomorrow: half of what is known is from the last 35 passes.
_NEWEST = 0.02
# A slot changes hands when that saves this share of an expert's reads: less may be chance.
_MARGIN = 0.05
# Slots that may change hands in a pass, as a share of all: each costs a copy within memory.
_SWAP_SHARE = 0.125


class Popular:
    """Holds the experts that passes want most often, whatever their layer: each saves a read as often as it is wanted.

    `chances` by layer [E]: the probability that a pass wants each expert, as far as is known; it learns as passes come.
    """

    def __init__(
        self,
        held: Iterable[ExpertKey],
        nbytes: Mapping[int, int],
        chances: Mapping[int, npt.NDArray[np.float64]],
    ) -> None:
        self._held = set(held)
        self._nbytes = nbytes
        self._chances = chances
        self._leaving: dict[int, deque[ExpertKey]] = {}

    def begin_pass(self) -> None:
        """The least popular may leave, at most so many in a pass."""
        ordered = sorted(self._held, key=self._chance)[: max(1, int(len(self._held) * _SWAP_SHARE))]
        self._leaving = {size: deque() for size in self._nbytes.values()}
        for key in ordered:
            self._leaving[self._nbytes[key.layer]].append(key)

    def saw(self, layer: int, wanted: Sequence[int]) -> None:
        chances = self._chances[layer]
        chances *= 1.0 - _NEWEST
        chances[list(wanted)] += _NEWEST

    def victim(self, entering: ExpertKey, may_leave: Callable[[ExpertKey], bool]) -> ExpertKey | None:
        leaving = self._leaving.get(self._nbytes[entering.layer], deque())
        found = next((key for key in leaving if may_leave(key)), None)
        if found is None or self._chance(entering) < self._chance(found) + _MARGIN:
            return None
        leaving.remove(found)
        self._held.remove(found)
        self._held.add(entering)
        return found

    def _chance(self, key: ExpertKey) -> float:
        return float(self._chances[key.layer][key.expert])
