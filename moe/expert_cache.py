"""Streams experts into layers: held ones from their slots, others through a ring, where they may win a slot.

The cache only coordinates: statistics (routing_stats.py), the order of reads (streaming_order.py) and the slots of held
experts (slots.py) are objects of their own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..offload.stream.lane import ShardKey
from ..offload.stream.stream import Arrival
from .expert import OneShotEvent, ResidentExpert
from .forecast import ForecastCounts
from .groups import ExpertGroups
from .routing_stats import RoutingStats
from .slots import ExpertSlots
from .streaming_mode import Mode
from .streaming_order import StreamingOrder


class RingExpert(NamedTuple):
    """An expert in the ring while it is computed; `resident` is None where no token wants it."""

    key: ShardKey
    arrival: Arrival[torch.Tensor]
    resident: ResidentExpert | None

    @property
    def is_computed(self) -> bool:
        return self.resident is None or self.resident.computed is None or self.resident.computed.is_set()

    def wait(self) -> None:
        if self.resident is not None and self.resident.computed is not None:
            self.resident.computed.wait()


@dataclass(slots=True)
class CacheCounts:
    """Counts of experts, one for each use: `wanted` by a layer, `hits` among them, `fetched`, `unwanted` among these.

    `swaps` counts slots that changed their expert; `turns` counts layers of passes by mode.
    """

    turns: Counter[Mode] = field(default_factory=Counter)
    wanted: int = 0
    hits: int = 0
    fetched: int = 0
    unwanted: int = 0
    swaps: int = 0


class StreamingExpertCache:
    """Serves the layers of a pass one after the other; all layers share it, because they share a ring and the slots.

    Every wanted expert is either held in a slot or arrives through the ring. An expert that arrives and is wanted often
    enough evicts a held one.
    """

    def __init__(self, stats: RoutingStats, order: StreamingOrder, slots: ExpertSlots) -> None:
        self._stats = stats
        self.order = order
        self._slots = slots
        # In the order in which they arrived, which is the order of the ring.
        self._computing: deque[RingExpert] = deque()
        self.counts = CacheCounts()

    def start_counting(self) -> None:
        """Passes so far do not belong to the job."""
        self.counts, self.order.forecast.counts = CacheCounts(), ForecastCounts()

    def fetch(self, layer: int, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        """Yields the experts that `groups` want as they become usable: first the held ones, then those that arrive.

        Compute the first list before asking for the next one: held experts may be evicted afterwards.
        """
        wanted = set(groups.wanted)
        self._begin(layer, groups)
        self.order.request_ahead()
        held = self.order.request_missing(layer, wanted)
        self.counts.hits += len(held)
        self.order.guess_next(groups, hidden)
        self.order.request_ahead()
        yield [ResidentExpert(expert, self._slots.weights(layer, expert)) for expert in sorted(held)]
        while self.order.is_pending:
            # A thread that would wait for the lane first lets the others finish, so that only this call waits.
            self._release(wait=not self.order.is_ready)
            yield self._hand_out(self.order.arrivals(), wanted)
        self._release(wait=True)

    def _begin(self, layer: int, groups: ExpertGroups) -> None:
        while self._computing:
            # Left over from a pass that was aborted.
            self.order.release(self._computing.popleft().arrival)
        if self.order.begin(layer, groups):
            self._slots.begin_pass()
        self._stats.observe(layer, groups)
        self._slots.observe(layer, groups.wanted)
        self.counts.turns[self.order.mode(layer)] += 1
        self.counts.wanted += len(groups.wanted)

    def _hand_out(
        self, together: list[tuple[ShardKey, Arrival[torch.Tensor]]], wanted: set[int]
    ) -> list[ResidentExpert]:
        handed = []
        for key, arrival in together:
            resident = None
            if key.expert in wanted:
                resident = ResidentExpert(key.expert, self._slots.bind(key, arrival.view), OneShotEvent())
                handed.append(resident)
            self._computing.append(RingExpert(key, arrival, resident))
        return handed

    def _release(self, wait: bool) -> None:
        """Frees the ring slots of computed experts, oldest first; with `wait`, waits until all are computed."""
        while self._computing and (wait or self._computing[0].is_computed):
            oldest = self._computing.popleft()
            oldest.wait()
            self._offer_slot(oldest)
            self.order.release(oldest.arrival)
        self.order.request_ahead()

    def _offer_slot(self, expert: RingExpert) -> None:
        wanted = expert.resident is not None
        self.counts.fetched += 1
        self.counts.unwanted += not wanted
        if wanted and self._slots.offer(expert.key, expert.arrival.view, self.order.may_leave):
            self.counts.swaps += 1


@dataclass(slots=True)
class StreamedExperts:
    """The source of one layer's experts where a model's experts stream (an ExpertSource, expert.py)."""

    layer: int
    num_experts: int
    cache: StreamingExpertCache

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        return self.cache.fetch(self.layer, groups, hidden)
