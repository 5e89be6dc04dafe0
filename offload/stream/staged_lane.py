"""Streams over three tiers: a stream from disk into pinned host memory feeds the copies to the device.

Shards that are pinned in host memory skip the first stage. Has no thread of its own: every call passes on what has
arrived from the disk. Knows neither files nor CUDA. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cuda_lane import CudaLane, Event
from .lane import Shard, Slot, SyncPoint
from .stream import ShardStream


@dataclass(slots=True, eq=False)
class Relay:
    """One shard on its way through both stages; `copied` is None until its bytes have arrived in host memory."""

    shard: Shard
    slot: Slot
    after: SyncPoint | None
    copied: Event | None = None

    def query(self) -> bool:
        return self.copied is not None and self.copied.query()


class StagedLane:
    """A Lane that copies shards for which `is_direct` is true with `direct`, and all others when they have left `host`.

    A shard is requested from `host` when its slot on the device is known. `staging` copies from the memory that `host`
    fills; it and `direct` copy into the same ring.
    """

    def __init__(
        self, host: ShardStream[Any], staging: CudaLane, direct: CudaLane, is_direct: Callable[[Shard], bool]
    ) -> None:
        self._host = host
        self._staging = staging
        self._direct = direct
        self._is_direct = is_direct
        self._waiting: deque[Relay] = deque()

    @property
    def nbytes_moved(self) -> int:
        return self._host.nbytes_moved + self._staging.nbytes_moved + self._direct.nbytes_moved

    @property
    def seconds_waited(self) -> float:
        return self._direct.seconds_waited + self._host.seconds_waited

    @property
    def seconds_busy(self) -> float:
        # The stages work at the same time: the slower one is the bottleneck.
        return max(self._host.seconds_busy, self._staging.seconds_busy + self._direct.seconds_busy)

    def start(self, shard: Shard, slot: Slot, after: SyncPoint | None) -> Relay:
        relay = Relay(shard, slot, after)
        if self._is_direct(shard):
            relay.copied = self._direct.start(shard, slot, after)
        else:
            self._waiting.append(relay)
            self._host.ask(shard)
            self._pass_on_ready()
        return relay

    def wait(self, ready: Relay) -> None:
        # A wait on an event that is not recorded yet does not wait: the copy must be started first.
        while ready.copied is None:
            self._pass_on()
        self._direct.wait(ready.copied)
        self._pass_on_ready()

    def mark_used(self) -> Event:
        self._pass_on_ready()
        return self._direct.mark_used()

    def close(self) -> None:
        self._host.close()
        self._staging.close()
        self._direct.close()

    def _pass_on_ready(self) -> None:
        while self._waiting and self._host.is_ready():
            self._pass_on()

    def _pass_on(self) -> None:
        arrival = self._host.next()
        relay = self._waiting.popleft()
        if arrival.shard != relay.shard:
            raise ValueError(f"the host stream returned {arrival.shard}, wanted {relay.shard}; it has another consumer")
        relay.copied = self._staging.copy(arrival.slot.offset, relay.slot, relay.after)
        # The reader may overwrite the host's bytes once the copy from them is done, long before compute is.
        self._host.done(arrival, relay.copied)
