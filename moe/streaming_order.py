"""Which experts are requested for which layer, in which order: before its router has chosen, and once it has.

A *turn* is one visit to a layer with experts; turns are counted from the first pass on.

A guess is what the next layer's router makes of this layer's hidden states. A wrong one costs only bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from ..offload.stream.stream import Arrival, Shard, ShardKey, ShardStream
from .expert import ExpertGroups
from .routing_stats import RoutingStats
from .running_mean import RunningMean
from .streaming_mode import _NEWEST, Mode, RouterLatency, choose_mode, guess_savings, num_guesses


@dataclass(slots=True)
class ForecastCounts:
    """Prefetches `issued`, those of them `used`, cache `misses` of the same layers, time `saved` in expert reads."""

    issued: int = 0
    used: int = 0
    misses: int = 0
    saved: float = 0.0


@dataclass(slots=True)
class ExpertForecast:
    """Call `guess` with what was foreseen for the layer that comes next, then `observe` with what it wanted.

    `routers` maps a layer to the weights [E, D] of its router; corrections that it adds to its scores are left out.
    """

    stats: RoutingStats
    routers: Mapping[int, torch.Tensor]
    counts: ForecastCounts = field(default_factory=ForecastCounts)
    # The fraction of right guesses, by layer.
    _precision: dict[int, RunningMean] = field(default_factory=dict)
    _guesses: list[int] = field(default_factory=list)

    def foresee(self, layer: int, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        """The best experts of `layer` for each token and their scores, both [T, A], on the device of hidden [T, D]:
        the states that the experts of the layer before receive. Nothing where its router is not known.
        """
        router = self.routers.get(layer)
        if router is None or router.shape[1] != hidden.shape[1]:
            return ()
        scores = torch.nn.functional.linear(hidden, router.to(hidden.dtype)).float().softmax(-1)
        best = scores.topk(min(per_token, router.shape[0]), dim=-1)
        return best.indices, best.values

    def guess(self, foreseen: tuple[torch.Tensor, ...], held: Collection[int], most: int) -> list[int]:
        """At most `most` experts of those that were foreseen, none of them held, likeliest first."""
        experts, scores = (each.cpu().numpy().ravel() for each in foreseen)
        # Weighed by its score: a token's last choice is often wrong here, its first one almost never.
        expected = np.bincount(experts.astype(np.int64, copy=False), scores)
        # As Python floats: reading single elements of an array takes as long as the sort.
        values = expected.tolist()
        likely = (each for each in np.argsort(-expected, kind="stable").tolist() if values[each] > 0.0)
        self._guesses = list(islice((each for each in likely if each not in held), most))
        return self._guesses

    def observe(self, layer: int, wanted: Collection[int]) -> None:
        """Compares the guesses for `layer`, if there are any, with what its router chose."""
        if self._guesses:
            precision = len(set(self._guesses) & set(wanted)) / len(self._guesses)
            self._precision.setdefault(layer, RunningMean(_NEWEST)).observe(precision)
        self._guesses = []

    def count(self, begun: Collection[int], missing: Collection[int], idle: float) -> None:
        """Counts a layer whose router has chosen: the guesses whose reads had `begun`, and all `missing` experts.

        Estimates the time saved, in expert reads: at most `idle`, minus wrong reads that did not fit into it.
        """
        used = len(set(begun) & set(missing))
        wrong = len(begun) - used
        self.counts.issued += len(begun)
        self.counts.used += used
        self.counts.misses += len(missing)
        self.counts.saved += min(used, idle) - max(0.0, wrong - max(0.0, idle - used))

    def precision(self, layer: int) -> float:
        """The fraction of a layer's guesses that is right; 0 before the first guess."""
        mean = self._precision.get(layer)
        return 0.0 if mean is None else mean.value or 0.0


# Guesses that are not used are made in one of so many passes: they take a sixteenth of a pass of one sequence.
_TRIAL = 4
# The most experts that are handed out at once where the stream waits for a CPU to compute them. Nothing is read into
# their ring slots until then, so this is a small part of a ring.
MAX_TOGETHER = 8


class PendingFetch(NamedTuple):
    """A read of an expert that was requested for a turn and was not handed out yet."""

    turn: int
    key: ShardKey
    shard: Shard


class ExpertFetchQueue:
    """The pending fetches of a stream, sorted by turn; reads that have begun cannot be reordered.

    `shard` finds the bytes of an expert.
    """

    def __init__(self, stream: ShardStream[torch.Tensor], shard: Callable[[ShardKey], Shard]) -> None:
        self._stream = stream
        self._shard = shard
        self._pending: deque[PendingFetch] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, turn: int) -> bool:
        return any(fetch.turn == turn for fetch in self._pending)

    def experts(self, turn: int) -> set[int]:
        """The experts that are pending for this turn."""
        return {fetch.key.expert for fetch in self._pending if fetch.turn == turn}

    def request(self, turn: int, keys: Iterable[ShardKey]) -> None:
        """Adds fetches before every fetch of a later turn that has not begun."""
        self._push(self._recall(), [PendingFetch(turn, key, self._shard(key)) for key in keys])

    def request_all(self, turn: int, keys: Iterable[ShardKey]) -> None:
        """As `request`, in whatever order neighbours in memory are one copy."""
        fetches = [PendingFetch(turn, key, self._shard(key)) for key in keys]
        fetches.sort(key=lambda each: each.shard.offset if each.shard.file is None else -1)
        self._push(self._recall(), fetches)

    def keep(self, turn: int, wanted: Collection[int]) -> None:
        """Cancels this turn's fetches of experts that are not `wanted`, except those that have begun."""
        self._push([fetch for fetch in self._recall() if fetch.turn != turn or fetch.key.expert in wanted])

    def is_ready(self, turn: int) -> bool:
        """Whether the next fetch belongs to this turn and its bytes are there."""
        return bool(self._pending) and self._pending[0].turn == turn and self._stream.is_ready()

    def arrivals(self, turn: int, most: int) -> list[tuple[ShardKey, Arrival[torch.Tensor]]]:
        """Waits for one expert of this turn; returns it with those of the turn that are there too, `most` in all."""
        # Drops reads that had begun for other turns and precede this turn's; those of later turns are repeated.
        while self._pending[0].turn != turn:
            skipped = self._pending.popleft()
            self._stream.done(self._stream.next())
            again = [skipped] if skipped.turn > turn else []
            self._push(again, self._recall())
        together = [(self._pending.popleft().key, self._stream.next())]
        while len(together) < most and self.is_ready(turn):
            together.append((self._pending.popleft().key, self._stream.next()))
        return together

    def done(self, arrivals: Sequence[Arrival[torch.Tensor]]) -> None:
        """The ring slots of these arrivals may be overwritten."""
        self._stream.done(*arrivals)

    def drop(self) -> None:
        """Cancels all fetches; reads that have begun are waited for."""
        self._stream.drop()
        self._pending.clear()

    def _recall(self) -> list[PendingFetch]:
        recalled = [self._pending.pop() for _ in self._stream.recall()]
        return recalled[::-1]

    def _push(self, *runs: list[PendingFetch]) -> None:
        ordered = sorted((fetch for run in runs for fetch in run), key=lambda fetch: fetch.turn)
        self._pending.extend(ordered)
        self._stream.ask(*(fetch.shard for fetch in ordered))


class StreamingOrder:
    """Decides what the queue fetches: the misses of a layer once its router has chosen, and ahead of the router what
    the layer's mode allows."""

    def __init__(
        self,
        queue: ExpertFetchQueue,
        held: Callable[[int], AbstractSet[int]],
        forecast: ExpertForecast,
        latency: RouterLatency,
        most_ahead: int,
        forced: Mode | None = None,
        most_divided: int = 0,
        most_together: int = MAX_TOGETHER,
    ) -> None:
        """`held` returns the experts of a layer that need no fetch now. `most_together` are handed out at once.

        `most_ahead` is the number of pending fetches that keeps the lane busy until a router has chosen. `forced` is
        the mode of every layer and pass; None: each layer has the cheapest one. In passes of up to `most_divided`
        tokens not all missing experts are to arrive.
        """
        self._queue = queue
        self._held = held
        self._forced = forced
        self.forecast = forecast
        self.latency = latency
        self._most_ahead = most_ahead
        self._most_divided = most_divided
        self._most_together = most_together
        self._layers = list(forecast.stats.layers)
        self._positions = {layer: position for position, layer in enumerate(self._layers)}
        self._tokens = 0
        self._turn = -1
        # The first turn for which nothing was requested ahead of its router.
        self._ahead = 0
        self._mode = dict.fromkeys(self._layers, forced or Mode.WANTED)
        # Whether the layer of this turn is visited again before others: what these want must not stand in its way.
        self.stays = False
        # Experts that the next turn may want, best first; None until a forecast was made.
        self._guess: list[int] | None = None

    def mode(self, layer: int) -> Mode:
        """The mode of a layer in this pass."""
        return self._mode[layer]

    def reads_all(self, layer: int, experts: int) -> bool:
        """Whether the mode of a layer in the last pass was to read all, and so many experts fit into the ring."""
        return self._mode[layer] is Mode.ALL and experts < self._most_ahead

    def begin(self, layer: int, groups: ExpertGroups) -> bool:
        """Begins the next turn, a visit to `layer`, of which the router has chosen: as `visit`."""
        first = self.visit(layer, len(groups.expert_ids))
        self.forecast.observe(layer, groups.wanted)
        return first

    def visit(self, layer: int, tokens: int) -> bool:
        """Begins the next turn, a visit to `layer`. Returns whether a pass begins with it; then it chooses the modes.

        Fetches that an aborted pass requested for turns that are skipped are dropped when later ones arrive. A layer
        that is visited twice in a row, as heads that draft several tokens are, goes on with its turn.
        """
        if len(self._layers) == 1 or layer != self._layer_of(self._turn):
            self._turn = self._next_turn(layer)
        elif self._ahead == self._turn + 1:
            # Its experts are read again, before those of later layers.
            self._ahead = self._turn
        self._guess = None
        self._ahead = max(self._ahead, self._turn)
        first = layer == self._layers[0]
        guessed = self._mode[self._layer_of(self._turn - 1)] is Mode.FORECAST
        self.latency.end(tokens, guessed, first)
        if first:
            self.stays = False
            self._choose_modes(tokens)
        self.latency.begin()
        return first

    def _choose_modes(self, tokens: int) -> None:
        self._tokens = tokens
        for layer in self._layers:
            waits = self.latency.mean(tokens, layer == self._layers[0])
            precision, stats = self.forecast.precision(layer), self.forecast.stats
            mode = choose_mode(stats, layer, tokens, self._held(layer), waits, precision)
            divided = mode is Mode.ALL and tokens <= self._most_divided
            self._mode[layer] = self._forced or (Mode.WANTED if divided else mode)

    def request_missing(
        self, layer: int, wanted: set[int], divide: Callable[[set[int], int], set[int]] | None = None
    ) -> tuple[set[int], set[int]]:
        """Requests the `wanted` experts that are neither held nor pending, and cancels fetches of unwanted ones.

        Returns the wanted experts that are held, and those that need not arrive: what `divide` chooses of the missing
        ones, beside a number of others that are on their way.
        """
        held, apart = wanted & self._held(layer), set[int]()
        if divide is not None:
            self._queue.keep(self._turn, ())
            begun = self._queue.experts(self._turn)
            apart = divide(wanted - held - begun, len(begun))
            wanted = wanted - apart
        requested = self._queue.experts(self._turn)
        if self._mode[layer] is not Mode.ALL and not requested <= wanted:
            self._queue.keep(self._turn, wanted)
        if self._mode[layer] is Mode.FORECAST:
            idle = self.latency.mean(self._tokens).idle
            self.forecast.count(self._queue.experts(self._turn), wanted - held, idle)
        self._queue.request_all(self._turn, self._keys(layer, sorted(wanted - requested - held)))
        self._ahead = max(self._ahead, self._turn + 1)
        return held, apart

    def request_ahead(self) -> None:
        """Requests experts of later layers, those of the next pass included, until enough fetches are pending."""
        most_ahead = 0 if self.stays else self._most_ahead
        while len(self._queue) < most_ahead and self._ahead < self._turn + len(self._layers):
            layer = self._layer_of(self._ahead)
            if self._mode[layer] is Mode.ALL:
                every, held = range(self.forecast.stats.layers[layer].num_experts), self._held(layer)
                self._queue.request_all(self._ahead, self._keys(layer, [each for each in every if each not in held]))
            elif self._mode[layer] is Mode.FORECAST and self._guess is not None and self._ahead == self._turn + 1:
                self._queue.request(self._ahead, self._keys(layer, self._guess))
            else:
                break
            self._ahead += 1

    def foresee(self, layer: int, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        """What the layer behind `layer` may want (`ExpertForecast`). In mode `wanted` one pass of _TRIAL has guesses,
        too, which are not used and show whether they would be good. Nothing for the first layer of a pass, for one that
        reads all, and where the best guesses would save nothing, as where reads hide behind compute.

        Before `begin`, the first layer of a pass sees the modes and the size of the pass before.
        """
        following = self._layer_of(self._positions[layer] + 1)
        useless = guess_savings(*self.latency.mean(self._tokens), precision=1.0) <= 0.0 or (
            self._mode[following] is Mode.WANTED and (self._turn // len(self._layers) + 1) % _TRIAL > 0
        )
        if useless or self._mode[following] is Mode.ALL or following == self._layers[0]:
            return ()
        return self.forecast.foresee(following, hidden, per_token)

    def guess_next(self, foreseen: tuple[torch.Tensor, ...]) -> None:
        """Guesses what the next layer of the pass wants from what was foreseen."""
        if foreseen:
            most = num_guesses(self.latency.mean(self._tokens).idle)
            self._guess = self.forecast.guess(foreseen, self._held(self._layer_of(self._turn + 1)), most)

    def leave_last(self) -> None:
        """Between two passes: the last layer is visited no more, and nothing is requested for it."""
        self._queue.drop()
        del self._positions[self._layers.pop()]
        # Behind the visit to the layer before it.
        self._turn, self._guess = len(self._layers) - 1, None
        self._ahead = self._turn + 1

    @property
    def is_pending(self) -> bool:
        """Whether experts of this turn were requested and not handed out yet."""
        return self._turn in self._queue

    @property
    def is_ready(self) -> bool:
        """Whether the next expert of this turn is there."""
        return self._queue.is_ready(self._turn)

    def arrivals(self) -> list[tuple[ShardKey, Arrival[torch.Tensor]]]:
        """Waits for the next experts of this turn: at least one, and at most as many as are handed out at once."""
        together = self._queue.arrivals(self._turn, self._most_together)
        self.latency.begin()
        return together

    def release(self, arrivals: Sequence[Arrival[torch.Tensor]]) -> None:
        """The arrivals were computed: their ring slots may be overwritten."""
        self._queue.done(arrivals)

    def may_leave(self, key: ShardKey) -> bool:
        """Whether an expert may be evicted: not where its layer's misses were requested already, without it."""
        return key.layer not in self._positions or self._next_turn(key.layer) >= self._ahead

    def _layer_of(self, turn: int) -> int:
        return self._layers[turn % len(self._layers)]

    def _next_turn(self, layer: int) -> int:
        """The turn of the next visit to a layer."""
        return self._turn + 1 + (self._positions[layer] - self._turn - 1) % len(self._layers)

    def _keys(self, layer: int, experts: Iterable[int]) -> list[ShardKey]:
        return [ShardKey(layer, expert) for expert in experts]
