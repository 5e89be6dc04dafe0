"""Three tiers at once: a stream into pinned host memory feeds the copies to the device.

Shards that lie pinned in host memory skip the first stage. No thread of its own: whatever has come from the disk is
passed on at every call. Knows neither files nor CUDA. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cuda_lane import CudaLane, Event
from .lane import Mark, Place, Shard
from .stream import ShardStream


@dataclass(slots=True, eq=False)
class Relay:
    """One shard's way over both stages; `copied` is None until its bytes have reached the host."""

    shard: Shard
    place: Place
    after: Mark | None
    copied: Event | None = None

    def query(self) -> bool:
        return self.copied is not None and self.copied.query()


class StagedLane:
    """A Lane that starts shards for which `is_direct` holds with `direct`, and all others as they arrive from `host`.

    `host` is asked for a shard when its place on the device is known. `staging` copies out of the memory that `host`
    fills; it and `direct` put into the same ring.
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
        # The stages work at the same time: the slower one is what is waited for.
        return max(self._host.seconds_busy, self._staging.seconds_busy + self._direct.seconds_busy)

    def start(self, shard: Shard, place: Place, after: Mark | None) -> Relay:
        relay = Relay(shard, place, after)
        if self._is_direct(shard):
            relay.copied = self._direct.start(shard, place, after)
        else:
            self._waiting.append(relay)
            self._host.ask(shard)
            self._pass_on_ready()
        return relay

    def wait(self, ready: Relay) -> None:
        # An event that is not yet recorded holds nobody back: the copy must be asked for first.
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
            raise ValueError(f"the host brought {arrival.shard}, wanted {relay.shard}; somebody else asks it too")
        relay.copied = self._staging.copy(arrival.place.offset, relay.place, relay.after)
        # The reader may overwrite the host's bytes when the copy out of them is over, long before compute is.
        self._host.done(arrival, relay.copied)
