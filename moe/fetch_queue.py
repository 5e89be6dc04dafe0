"""Experts that were asked for and are on their way, in the order of the layers that will want them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch

from ..offload.stream.lane import Shard
from ..offload.stream.stream import Arrival, ShardStream
from .policy import ExpertKey


class PendingFetch(NamedTuple):
    """An expert that was asked for; `turn` counts visits to layers with experts, from the first pass on."""

    turn: int
    key: ExpertKey


class ExpertFetchQueue:
    """Keeps the stream's queue sorted by turn, as far as bytes have not begun to move."""

    def __init__(self, stream: ShardStream[torch.Tensor], shard: Callable[[ExpertKey], Shard]) -> None:
        self._stream = stream
        self._shard = shard
        self._coming: deque[PendingFetch] = deque()

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, turn: int) -> bool:
        return any(coming.turn == turn for coming in self._coming)

    def of(self, turn: int) -> set[int]:
        """The experts that come for this turn."""
        return {coming.key.expert for coming in self._coming if coming.turn == turn}

    def ask(self, turn: int, keys: Iterable[ExpertKey]) -> None:
        """They come before everything that later turns want and that has not begun to move."""
        self._push(self._recall(), [PendingFetch(turn, key) for key in keys])

    def keep(self, turn: int, wanted: Collection[int]) -> None:
        """Of what comes for this turn only `wanted` still does, or what has begun."""
        self._push([coming for coming in self._recall() if coming.turn != turn or coming.key.expert in wanted])

    def is_ready(self, turn: int) -> bool:
        """Whether the next expert for this turn is there already."""
        return bool(self._coming) and self._coming[0].turn == turn and self._stream.is_ready()

    def arrivals(self, turn: int, most: int) -> list[tuple[ExpertKey, Arrival[torch.Tensor]]]:
        """At least one expert that comes for this turn, and as many of `most` as are there already."""
        self._clear_the_way(turn)
        together = [(self._coming.popleft().key, self._stream.next())]
        while len(together) < most and self.is_ready(turn):
            together.append((self._coming.popleft().key, self._stream.next()))
        return together

    def done(self, arrival: Arrival[torch.Tensor]) -> None:
        """Its place may be read into again."""
        self._stream.done(arrival)

    def _clear_the_way(self, turn: int) -> None:
        """Gives back what began to move for later turns before this one's wants were known; it is asked for again."""
        while self._coming[0].turn != turn:
            passed = self._coming.popleft()
            self._stream.done(self._stream.next())
            again = [passed] if passed.turn > turn else []
            self._push(again, self._recall())

    def _recall(self) -> list[PendingFetch]:
        recalled = [self._coming.pop() for _ in self._stream.recall()]
        return recalled[::-1]

    def _push(self, *runs: list[PendingFetch]) -> None:
        ordered = sorted((coming for run in runs for coming in run), key=lambda coming: coming.turn)
        self._coming.extend(ordered)
        self._stream.ask(*(self._shard(coming.key) for coming in ordered))
