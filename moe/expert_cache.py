"""The streaming expert cache: slots of held experts, who gives one up, and the experts that a layer gets."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..offload.stream.stream import Arrival, ShardKey
from ..quant.formats.format import Layout
from .expert import ExpertGroups, ExpertWeights, OneShotEvent, ResidentExpert
from .host_experts import HostExperts
from .routing_stats import RoutingStats
from .streaming_mode import Mode
from .streaming_order import MAX_TOGETHER, ForecastCounts, StreamingOrder

# Weight of the newest pass in an expert's probability: the last 35 passes make up half of it.
_NEWEST = 0.02
# An expert is evicted only where that raises the probability of a hit by this much: a smaller difference may be noise.
_MARGIN = 0.05
# The fraction of all slots that may be swapped in one pass: each swap costs a copy within memory.
_SWAP_FRACTION = 0.125
# About so many rows of held experts one thread computes at a time while others arrive.
_PIECE_ROWS = 64


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

    def leave(self, layer: int) -> None:
        """No pass wants the experts of a layer any more."""
        self._probabilities[layer][:] = 0.0

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
        self.hold(entering)
        return found

    def hold(self, entering: ShardKey) -> None:
        """`entering` is held from now on."""
        self._held.add(entering)

    def _probability(self, key: ShardKey) -> float:
        return float(self._probabilities[key.layer][key.expert])


Bind = Callable[[ShardKey, torch.Tensor], ExpertWeights]


class SlotMemory(Protocol):
    """Memory that knows which expert is in which slot; slots hold uint8 bytes."""

    def shard(self, key: ShardKey) -> torch.Tensor:
        """The slot of a held expert."""

    def take(self, entering: ShardKey, view: torch.Tensor) -> torch.Tensor | None:
        """Copies `entering`, whose bytes are `view`, into a free slot, and returns it; None where none is free."""

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        """Copies `entering`, whose bytes are `view`, into the slot of `leaving`, and returns that slot."""


class ExpertSlots:
    """The weights of the experts that are held in slots of `memory`, and the policy that swaps them.

    `bind` makes an expert's matrices from its bytes. `held` lists the experts that are held at first.
    """

    def __init__(self, held: Iterable[ShardKey], memory: SlotMemory, bind: Bind, policy: Popular) -> None:
        self._memory = memory
        self.bind = bind
        self.policy = policy
        self._weights: defaultdict[int, dict[int, ExpertWeights]] = defaultdict(dict)
        for key in held:
            self._weights[key.layer][key.expert] = bind(key, memory.shard(key))

    def held(self, layer: int) -> AbstractSet[int]:
        """The experts of a layer that are held now; the set follows later swaps."""
        return self._weights[layer].keys()

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """The weights of an expert that is held."""
        return self._weights[layer][expert]

    def offer(self, entering: ShardKey, view: torch.Tensor, may_leave: Callable[[ShardKey], bool]) -> bool:
        """Lets `entering`, whose bytes are `view`, take a free slot, or else evict an expert that `may_leave`. Returns
        whether it evicted one."""
        if (slot := self._memory.take(entering, view)) is not None:
            self.policy.hold(entering)
            self._weights[entering.layer][entering.expert] = self.bind(entering, slot)
            return False
        leaving = self.policy.victim(entering, may_leave)
        if leaving is not None:
            self.swap(leaving, entering, view)
        return leaving is not None

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> None:
        """`entering`, whose bytes are `view`, takes the slot of `leaving`, which must have the same size.

        The copy is ordered like any other compute: work that reads the slot finishes before it is overwritten.
        """
        del self._weights[leaving.layer][leaving.expert]
        slot = self._memory.swap(leaving, entering, view)
        self._weights[entering.layer][entering.expert] = self.bind(entering, slot)


class RingExpert(NamedTuple):
    """An expert in the ring while it is computed; `resident` is None where no token wants it."""

    key: ShardKey
    arrival: Arrival[torch.Tensor]
    resident: ResidentExpert | None

    @property
    def is_computed(self) -> bool:
        return self.resident is None or self.resident.computed is None or self.resident.computed.has_happened

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

    def __init__(
        self, stats: RoutingStats, order: StreamingOrder, slots: ExpertSlots, host: HostExperts | None = None
    ) -> None:
        """`host` computes some experts by the CPU, which then do not stream."""
        self._stats = stats
        self.host = host
        self.order = order
        self._slots = slots
        # In the order in which they arrived, which is the order of the ring.
        self._computing: deque[RingExpert] = deque()
        # Held experts that are computed now.
        self._in_use: set[ShardKey] = set()
        # What a device counts of layers that it computes whole, and which of their experts were held.
        self._counted: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}
        self._counts = CacheCounts()

    def start_counting(self) -> None:
        """Passes so far do not belong to the job."""
        self.settle()
        self._counts, self.order.forecast.counts = CacheCounts(), ForecastCounts()

    def reads_all(self, layer: int, num_experts: int) -> bool:
        """Whether a layer reads all, whatever its tokens want, and the ring has room for a quarter more, which the link
        brings while a device computes those that have come."""
        missing = num_experts - len(self._slots.held(layer))
        return self.order.reads_all(layer, missing + -(-missing // 4))

    def read_all(self, layer: int, num_experts: int, tokens: int, totals: torch.Tensor) -> list[ExpertWeights]:
        """All experts of a layer that `reads_all`, for a device that computes them together: call `computed_all` behind
        that.

        The device counts tokens in `totals` int64 [2, E + 1], as `Grouped.of` does; the next pass looks at them.
        """
        held = frozenset(self._slots.held(layer))
        self._clear()
        if self.order.visit(layer, tokens):
            self.settle()
            self._slots.policy.begin_pass()
        self._counted[layer] = totals, held
        self._counts.turns[Mode.ALL] += 1
        self.order.request_missing(layer, set(range(num_experts)))
        self.order.request_ahead()
        found = {expert: self._slots.weights(layer, expert) for expert in held}
        while self.order.is_pending:
            for key, arrival in self.order.arrivals():
                found[key.expert] = self._slots.bind(key, arrival.view)
                self._computing.append(RingExpert(key, arrival, None))
        # The host has not waited for them.
        self.order.latency.forget()
        return [found[expert] for expert in range(num_experts)]

    def computed_all(self) -> None:
        """What the device was told so far computes all that were read."""
        self._clear()
        self.order.request_ahead()

    def settle(self) -> None:
        """Observes what a device has counted since the last time, for which it waits."""
        if not self._counted:
            return
        counted, self._counted = self._counted, {}
        every = [totals for totals, _ in counted.values()]
        # One copy, whatever the layers' numbers of experts.
        found = iter(torch.cat([totals.view(-1) for totals in every]).cpu().tolist())
        torch._foreach_zero_(every)
        for layer, (totals, held) in counted.items():
            (*chosen, tokens), (*wanted, passes) = ([*islice(found, totals.shape[1])] for _ in range(2))
            # One that was broken off may have counted nothing.
            if passes:
                self._observe(layer, tokens, chosen)
                hits, fetched = sum(wanted[each] for each in held), passes * (len(chosen) - len(held))
                self._counts.wanted += sum(wanted)
                self._counts.hits += hits
                self._counts.fetched += fetched
                self._counts.unwanted += fetched - (sum(wanted) - hits)

    @property
    def counts(self) -> CacheCounts:
        """Of all passes so far."""
        self.settle()
        return self._counts

    def fetch(
        self, layer: int, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[list[ResidentExpert]]:
        """Yields the experts that `groups` want as they become usable: those that arrive, and held ones while none has.

        A ring slot is read into again once its expert is computed, so a CPU lets no arrival wait for what is held. On a
        device, which computes behind the host, all held ones come first.
        """
        wanted = set(groups.wanted)
        self._begin(layer, groups)
        self.order.request_ahead()
        divide = self.host.divider(layer, groups) if self.host else None
        held, apart = self.order.request_missing(layer, wanted, divide)
        if self.host and apart:
            self.host.begin(layer, groups, sorted(apart))
        self._counts.hits += len(held)
        self.order.guess_next(groups.foreseen or self.order.foresee(layer, hidden, groups.expert_ids.shape[1]))
        self.order.request_ahead()
        self._in_use = {ShardKey(layer, expert) for expert in held}
        waiting = deque(self._held_pieces(layer, sorted(held), groups))
        if not self.order.is_pending or hidden.device.type != "cpu":
            yield list(chain.from_iterable(waiting))
            waiting.clear()
        else:
            yield []
        while waiting or self.order.is_pending:
            self._release(wait=False)
            if waiting and not self.order.is_ready:
                yield waiting.popleft()
                continue
            if not self.order.is_ready:
                # A thread that would wait for the lane first lets the others finish, so that only this call waits.
                self._release(wait=True)
            yield self._hand_out(self.order.arrivals(), wanted)
        self._release(wait=True)
        if self.host:
            self.host.finish(rows)

    def _held_pieces(self, layer: int, held: Sequence[int], groups: ExpertGroups) -> Iterator[list[ResidentExpert]]:
        """Held experts in lists that one thread computes in some tenths of a millisecond, unless a single one takes
        longer."""
        rows = sum(groups.counts[expert] for expert in held)
        most = max(1, min(MAX_TOGETHER, _PIECE_ROWS * len(held) // max(1, rows)))
        for first in range(0, len(held), most):
            some = held[first : first + most]
            yield [ResidentExpert(expert, self._slots.weights(layer, expert)) for expert in some]

    def _may_leave(self, key: ShardKey) -> bool:
        return key not in self._in_use and self.order.may_leave(key)

    def leave(self, layer: int) -> None:
        """Between two passes: the last layer is visited no more, and its experts are the first to be evicted."""
        self._clear()
        self.settle()
        self._slots.policy.leave(layer)
        self.order.leave_last()

    def _clear(self) -> None:
        """Frees the ring slots that a pass left over which was aborted."""
        if self._computing:
            self.order.release([one.arrival for one in self._computing])
            self._computing.clear()

    def _begin(self, layer: int, groups: ExpertGroups) -> None:
        self._clear()
        if self.order.begin(layer, groups):
            self.settle()
            self._slots.policy.begin_pass()
        self._observe(layer, len(groups.expert_ids), groups.counts)
        self._counts.wanted += len(groups.wanted)
        self._counts.turns[self.order.mode(layer)] += 1

    def _observe(self, layer: int, tokens: int, counts: Sequence[int]) -> None:
        """A layer of a pass of `tokens`, of which so many chose each expert."""
        self._stats.observe(layer, tokens, counts)
        self._slots.policy.observe(layer, [expert for expert, count in enumerate(counts) if count])

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
        released = []
        while self._computing and (wait or self._computing[0].is_computed):
            oldest = self._computing.popleft()
            oldest.wait()
            wanted = oldest.resident is not None
            self._counts.fetched += 1
            self._counts.unwanted += not wanted
            if wanted and self._slots.offer(oldest.key, oldest.arrival.view, self._may_leave):
                self._counts.swaps += 1
            released.append(oldest.arrival)
        if released:
            self.order.release(released)
        self.order.request_ahead()


@dataclass(slots=True)
class StreamedExperts:
    """The source of one layer's experts where a model's experts stream (an ExpertSource, expert.py)."""

    layer: int
    num_experts: int
    cache: StreamingExpertCache
    layouts: tuple[Layout, ...] = ()
    """Those of an expert's matrices, of which all are in one shard."""

    @property
    def reads_all(self) -> bool:
        return self.cache.reads_all(self.layer, self.num_experts)

    def read_all(self, tokens: int, totals: torch.Tensor) -> list[ExpertWeights]:
        return self.cache.read_all(self.layer, self.num_experts, tokens, totals)

    def computed_all(self) -> None:
        self.cache.computed_all()

    def foresee(self, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        if self.cache.host is not None:
            self.cache.host.expect(self.layer, hidden)
        return self.cache.order.foresee(self.layer, hidden, per_token)

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        return self.cache.fetch(self.layer, groups, hidden, rows)
