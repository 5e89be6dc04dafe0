"""What a layer's experts go through: asked for, read into the ring, computed, their place freed or a slot taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..offload.stream.stream import Arrival
from .coming import ComingExperts
from .expert import Arrived
from .groups import ExpertGroups
from .idle import IdleTime
from .key import ExpertKey
from .modes import Mode, ModeChoice
from .policy import HoldPolicy
from .popularity import Popularity
from .slots import ExpertSlots

# Experts that are computed side by side when compute is what the stream waits for; their places are not read into
# meanwhile, so this stays a small part of a ring.
MAX_TOGETHER = 4


@dataclass(slots=True)
class SupplyCounts:
    """Experts, counted each time: `wanted` by a layer, of those `hits` that were held; `fetched`, of those `unwanted`.

    `swaps` are slots that changed hands; `turns` counts layers of passes by the mode that they ran in.
    """

    turns: Counter[Mode] = field(default_factory=Counter)
    wanted: int = 0
    hits: int = 0
    fetched: int = 0
    unwanted: int = 0
    swaps: int = 0


class ExpertSupply:
    """Serves the layers of a pass in turn; one for all of them, because they share a ring and the held experts' slots.

    Every expert of a pass is either held in a slot or comes through the ring. When one that comes is wanted so often
    that it should be held, it takes another one's slot as it passes by.
    """

    def __init__(
        self,
        coming: ComingExperts,
        slots: ExpertSlots,
        policy: HoldPolicy,
        modes: ModeChoice,
        popularity: Popularity,
        idle: IdleTime,
        most_ahead: int,
    ) -> None:
        """`most_ahead` experts keep the lane busy until a router has spoken: those that the ring has room for."""
        self._coming = coming
        self._slots = slots
        self._policy = policy
        self._modes = modes
        self._popularity = popularity
        self._idle = idle
        self._most_ahead = most_ahead
        self._layers = list(popularity.layers)
        self._positions = {layer: position for position, layer in enumerate(self._layers)}
        self._tokens = 0
        self._turn = -1
        # The first turn for which nothing was asked ahead of its router.
        self._ahead = 0
        self._mode = dict.fromkeys(self._layers, Mode.WANTED)
        self.counts = SupplyCounts()

    def fetch(self, layer: int, groups: ExpertGroups) -> Iterator[list[Arrived]]:
        """Yields the wanted experts as they become usable: those that did so together, until the next are asked for."""
        wanted = set(groups.wanted)
        self._begin(layer, groups)
        self._ask_ahead()
        held = self._ask_missing(layer, wanted)
        self._ask_ahead()
        yield [(expert, self._slots.weights(ExpertKey(layer, expert))) for expert in sorted(held)]
        while self._turn in self._coming:
            together = self._coming.arrivals(self._turn, MAX_TOGETHER)
            yield [(key.expert, self._slots.bind(key, one.view)) for key, one in together if key.expert in wanted]
            for key, arrival in together:
                self._offer_slot(key, arrival, key.expert in wanted)
                self._coming.done(arrival)
            self._ask_ahead()

    def _begin(self, layer: int, groups: ExpertGroups) -> None:
        """The next turn; with the first layer a pass begins, whose modes are chosen now."""
        self._turn = self._next_turn(layer)
        self._ahead = max(self._ahead, self._turn)
        tokens, wanted = len(groups.expert_ids), groups.wanted
        gap = self._idle.since_last()
        if layer == self._layers[0]:
            self._tokens = tokens
            self._policy.begin_pass()
            for each in self._layers:
                self._mode[each] = self._modes.choose(each, tokens, self._slots.of(each))
        elif gap is not None and self._mode[layer] is not Mode.ALL:
            self._modes.waited(tokens, gap)
        self._modes.saw(layer, tokens, len(wanted))
        self._popularity.saw(layer, tokens, groups.counts)
        self._policy.saw(layer, wanted)
        self.counts.turns[self._mode[layer]] += 1
        self.counts.wanted += len(wanted)

    def _ask_missing(self, layer: int, wanted: set[int]) -> set[int]:
        """The router has spoken: what was not foreseen is asked for, what is not wanted is taken back."""
        asked = self._coming.of(self._turn)
        held = wanted & self._slots.of(layer)
        self.counts.hits += len(held)
        if self._mode[layer] is not Mode.ALL and not asked <= wanted:
            self._coming.keep(self._turn, wanted)
        self._ask(self._turn, wanted - asked - held)
        self._ahead = max(self._ahead, self._turn + 1)
        return held

    def _ask_ahead(self) -> None:
        """Of layers that are streamed whole, as much as there is room for; the ring goes on into the next pass."""
        while len(self._coming) < self._most_ahead and self._ahead < self._turn + len(self._layers):
            layer = self._layers[self._ahead % len(self._layers)]
            if self._mode[layer] is not Mode.ALL:
                break
            self._ask(self._ahead, set(range(self._popularity.layers[layer].num_experts)) - self._slots.of(layer))
            self._ahead += 1

    def _ask(self, turn: int, experts: set[int]) -> None:
        layer = self._layers[turn % len(self._layers)]
        self._coming.ask(turn, [ExpertKey(layer, expert) for expert in sorted(experts)])

    def _offer_slot(self, key: ExpertKey, arrival: Arrival[torch.Tensor], wanted: bool) -> None:
        self.counts.fetched += 1
        self.counts.unwanted += not wanted
        leaving = self._policy.victim(key, self._may_leave) if wanted else None
        if leaving is not None:
            self._slots.swap(leaving, key, arrival.view)
            self.counts.swaps += 1

    def _may_leave(self, key: ExpertKey) -> bool:
        """Not where its layer counts on it: all that it lacks is on its way already."""
        return self._next_turn(key.layer) >= self._ahead

    def _next_turn(self, layer: int) -> int:
        """The turn at which a layer is visited next."""
        return self._turn + 1 + (self._positions[layer] - self._turn - 1) % len(self._layers)
