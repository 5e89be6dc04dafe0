"""What a layer's experts go through: asked for, read into the ring, computed, their place freed or a slot taken."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..offload.stream.stream import Arrival
from .expert import Arrived, Once
from .fetch_queue import ExpertFetchQueue
from .forecast import Forecast, ForecastCounts
from .groups import ExpertGroups
from .policy import ExpertKey, HoldPolicy
from .slots import ExpertSlots
from .streaming_mode import Mode, ModeChoice, RouterLatency, guesses

# Experts that are handed out at once when compute is what the stream waits for; their places are not read into
# meanwhile, so this stays a small part of a ring.
MAX_TOGETHER = 4


class Computing(NamedTuple):
    """An expert that lies in the ring while it is computed; `arrived` is None where no token wants it."""

    key: ExpertKey
    arrival: Arrival[torch.Tensor]
    arrived: Arrived | None

    @property
    def is_finished(self) -> bool:
        return self.arrived is None or self.arrived.computed is None or self.arrived.computed.is_set()

    def wait(self) -> None:
        if self.arrived is not None and self.arrived.computed is not None:
            self.arrived.computed.wait()


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
        coming: ExpertFetchQueue,
        slots: ExpertSlots,
        policy: HoldPolicy,
        modes: ModeChoice,
        forecast: Forecast,
        gap: RouterLatency,
        most_ahead: int,
    ) -> None:
        """`most_ahead` experts keep the lane busy until a router has spoken: those that the ring has room for."""
        self._coming = coming
        self._slots = slots
        self._policy = policy
        self._modes = modes
        self.forecast = forecast
        self._gap = gap
        self._most_ahead = most_ahead
        self._layers = list(forecast.popularity.layers)
        self._positions = {layer: position for position, layer in enumerate(self._layers)}
        self._tokens = 0
        self._turn = -1
        # In the order in which they arrived, which is that of the ring.
        self._computing: deque[Computing] = deque()
        # The first turn for which nothing was asked ahead of its router.
        self._ahead = 0
        self._mode = dict.fromkeys(self._layers, Mode.WANTED)
        # For the next turn, best first; None until it is made.
        self._guess: list[int] | None = None
        self.counts = SupplyCounts()

    @property
    def seconds_each(self) -> float:
        """How long an expert took on its way, in the mean."""
        return self._gap.seconds_each

    @property
    def expert_nbytes(self) -> int:
        """Of the largest."""
        return self._gap.nbytes

    def start_counting(self) -> None:
        """Passes so far do not belong to the job."""
        self.counts, self.forecast.counts = SupplyCounts(), ForecastCounts()

    def fetch(self, layer: int, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        """Yields the wanted experts as they become usable: those that are held, then others, some together.

        Before the second time it is asked, the held ones must have been computed: their slots may change hands.
        """
        wanted = set(groups.wanted)
        self._begin(layer, groups)
        self._ask_ahead()
        held = self._ask_missing(layer, wanted)
        self._foresee(groups, hidden)
        self._ask_ahead()
        yield [Arrived(expert, self._slots.weights(ExpertKey(layer, expert))) for expert in sorted(held)]
        while self._turn in self._coming:
            # Whoever would wait for the lane lets the others finish first: then it is all of compute that waits.
            self._give_back(wait=not self._coming.is_ready(self._turn))
            together = self._coming.arrivals(self._turn, MAX_TOGETHER)
            self._gap.begin()
            yield self._hand_out(together, wanted)
        self._give_back(wait=True)

    def _hand_out(self, together: list[tuple[ExpertKey, Arrival[torch.Tensor]]], wanted: set[int]) -> list[Arrived]:
        handed = []
        for key, arrival in together:
            arrived = None
            if key.expert in wanted:
                arrived = Arrived(key.expert, self._slots.bind(key, arrival.view), Once())
                handed.append(arrived)
            self._computing.append(Computing(key, arrival, arrived))
        return handed

    def _give_back(self, wait: bool) -> None:
        """The places of experts that were computed, oldest first; all of them, once they are, with `wait`."""
        while self._computing and (wait or self._computing[0].is_finished):
            oldest = self._computing.popleft()
            oldest.wait()
            self._offer_slot(oldest.key, oldest.arrival, oldest.arrived is not None)
            self._coming.done(oldest.arrival)
        self._ask_ahead()

    def _begin(self, layer: int, groups: ExpertGroups) -> None:
        """The next turn; with the first layer a pass begins, whose modes are chosen now."""
        while self._computing:
            # Of a pass that broke off; what it had asked for beyond is passed over with its turn.
            self._coming.done(self._computing.popleft().arrival)
        self._turn, self._guess = self._next_turn(layer), None
        self._ahead = max(self._ahead, self._turn)
        tokens, wanted = len(groups.expert_ids), groups.wanted
        first = layer == self._layers[0]
        guessed = self._mode[self._layer_of(self._turn - 1)] is Mode.FORECAST
        self._gap.end(tokens, guessed, first)
        if first:
            self._begin_pass(tokens)
        self._gap.begin()
        self.forecast.saw(layer, wanted)
        self._modes.saw(layer, tokens, len(wanted))
        self.forecast.popularity.saw(layer, tokens, groups.counts)
        self.forecast.affinity.saw(layer, groups.expert_ids)
        self._policy.saw(layer, wanted)
        self.counts.turns[self._mode[layer]] += 1
        self.counts.wanted += len(wanted)

    def _begin_pass(self, tokens: int) -> None:
        self._tokens = tokens
        self._policy.begin_pass()
        for layer in self._layers:
            wait = self._gap.mean(tokens, layer == self._layers[0])
            precision = self.forecast.precision(layer)
            self._mode[layer] = self._modes.choose(layer, tokens, self._slots.of(layer), wait, precision)

    def _ask_missing(self, layer: int, wanted: set[int]) -> set[int]:
        """The router has spoken: what was not foreseen is asked for, what is not wanted is taken back."""
        asked = self._coming.of(self._turn)
        held = wanted & self._slots.of(layer)
        self.counts.hits += len(held)
        if self._mode[layer] is not Mode.ALL and not asked <= wanted:
            self._coming.keep(self._turn, wanted)
        if self._mode[layer] is Mode.FORECAST:
            self.forecast.count(self._coming.of(self._turn), wanted - held, self._gap.mean(self._tokens).gap)
        self._ask(self._turn, sorted(wanted - asked - held))
        self._ahead = max(self._ahead, self._turn + 1)
        return held

    def _ask_ahead(self) -> None:
        """What is known of layers to come, as much as there is room for; the ring goes on into the next pass."""
        while len(self._coming) < self._most_ahead and self._ahead < self._turn + len(self._layers):
            layer = self._layer_of(self._ahead)
            if self._mode[layer] is Mode.ALL:
                every = range(self.forecast.popularity.layers[layer].num_experts)
                self._ask(self._ahead, [expert for expert in every if expert not in self._slots.of(layer)])
            elif self._mode[layer] is Mode.FORECAST and self._guess is not None and self._ahead == self._turn + 1:
                self._ask(self._ahead, self._guess)
            else:
                break
            self._ahead += 1

    def _foresee(self, groups: ExpertGroups, hidden: torch.Tensor) -> None:
        """Guesses are made where they may be used, or might be if they prove good."""
        layer = self._layer_of(self._turn + 1)
        if self._mode[layer] is Mode.ALL:
            return
        same_pass = layer != self._layers[0]
        most = guesses(self._gap.mean(self._tokens, not same_pass).gap)
        held = self._slots.of(layer)
        self._guess = self.forecast.guess(layer, groups, hidden if same_pass else None, held, most)

    def _layer_of(self, turn: int) -> int:
        return self._layers[turn % len(self._layers)]

    def _ask(self, turn: int, experts: Iterable[int]) -> None:
        layer = self._layer_of(turn)
        self._coming.ask(turn, [ExpertKey(layer, expert) for expert in experts])

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


@dataclass(slots=True)
class StreamedExperts:
    """What the model's one supply has for this layer."""

    layer: int
    num_experts: int
    supply: ExpertSupply

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        return self.supply.fetch(self.layer, groups, hidden)
