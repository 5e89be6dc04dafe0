"""Weights during passes: held shards are bound once, the others when they arrive, ahead of compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch

from ...moe.streaming_mode import DEFAULTS, ExpertOptions
from ...offload.store.store import Store
from ...offload.stream.lane import HEAD, ShardKey
from ...offload.stream.stream import Arrival
from ..model.assembly import LayerAssembly
from ..plan.placement import Plan
from .experts import ModelExperts
from .lanes import Lanes, extent_of
from .memory import WeightMemory
from .routing_profile import Profile, kept, merge, profile_shapes


class StreamedWeights:
    """Binds a model's shards to its layers; `arrivals` drives the layers of a pass. Close it when done.

    `memory` is filled already; shards that it does not keep are read from `store`.
    """

    def __init__(
        self,
        memory: WeightMemory,
        plan: Plan,
        layers: list[LayerAssembly],
        store: Store | None,
        options: ExpertOptions = DEFAULTS,
    ) -> None:
        self._memory = memory
        self._layers = layers
        self._store = store
        self._lanes = Lanes(memory, plan, store)
        self._arriving = {key.layer for key in memory.streamed if key == ShardKey(key.layer)}
        self._passing: Iterator[Arrival[Any]] = iter(())
        self._not_counted = (0, 0)
        self._waited_before = (0.0, 0.0)
        for index, layer in enumerate(layers):
            if ShardKey(index) in memory.held:
                layer.bind_dense(memory.shard(ShardKey(index)))
        with ExitStack() as opened:
            opened.callback(self._lanes.close)
            self.experts = ModelExperts(memory, self._lanes, layers, options, plan.max_sequences, self._profile())
            opened.pop_all()

    @property
    def head_shard(self) -> torch.Tensor | None:
        return self._memory.shard(HEAD) if HEAD in self._memory.held else None

    @property
    def memory(self) -> WeightMemory:
        return self._memory

    @property
    def ring_nbytes(self) -> int:
        """Bytes that are allocated for the rings that shards stream through."""
        return sum(self._lanes.ring_nbytes)

    @property
    def nbytes_from_disk(self) -> int:
        """Bytes read from the disk for passes so far."""
        return self._counts()[0] - self._not_counted[0]

    @property
    def nbytes_to_device(self) -> int:
        """Bytes copied to the device for passes so far."""
        return self._counts()[1] - self._not_counted[1]

    @property
    def seconds_waited(self) -> tuple[float, float]:
        """The seconds that compute waited in passes so far: for the disk, and for the link to the device."""
        disk, link = self._lanes.seconds_waited
        return disk - self._waited_before[0], link - self._waited_before[1]

    @property
    def seconds_reading(self) -> float:
        """The seconds that readers had something to read, for the kind of shards where that is longest."""
        return max((reader.seconds_busy for reader in self._lanes.readers), default=0.0)

    @property
    def nbytes_moved(self) -> int:
        """Bytes read and copied so far, chunk by chunk, those of shards in transfer included."""
        return sum(stream.nbytes_moved for stream in self._lanes.streams)

    def fail(self, cause: BaseException) -> None:
        """Raises StreamBroken from `cause` in every thread that waits for bytes."""
        for reader in self._lanes.readers:
            reader.fail(cause)

    def start_counting(self) -> None:
        """Forgets the bytes of passes so far."""
        self._not_counted = self._counts()
        self._waited_before = self._lanes.seconds_waited
        self.experts.start_counting()

    def arrivals(self) -> Iterator[int]:
        """Yields the layers of one pass; each is usable until the next one is asked for."""
        # Shards arrive in a fixed order: those that an aborted pass has left are drained first.
        deque(self._passing, maxlen=0)
        if self._lanes.dense is not None:
            self._passing = self._lanes.dense.cycle(len(self._arriving))
        for index, layer in enumerate(self._layers):
            if index in self._arriving:
                layer.bind_dense(next(self._passing).view)
            yield index
        deque(self._passing, maxlen=0)

    def close(self) -> None:
        self._lanes.close()
        if self._store is not None:
            # The profile is optional: a store of another user, or a full disk, is no reason to fail.
            with suppress(OSError):
                merge(self._store.folder, self.experts.observed)
            self._store.close()

    def _profile(self) -> Profile:
        """What earlier jobs counted."""
        if self._store is None:
            return {}
        counts = [layer.shards.num_experts for layer in self._layers]
        return kept(self._store.folder, profile_shapes(counts))

    def _counts(self) -> tuple[int, int]:
        streams = self._lanes.streams
        to_device = sum(stream.nbytes_arrived for stream in streams) if self._memory.device else 0
        return sum(stream.nbytes_from_files for stream in streams), to_device


def fill_from_store(memory: WeightMemory, store: Store) -> None:
    """Reads every shard that is held or staged. Raises BadStore for a damaged one."""
    for key in (*memory.held, *memory.staged):
        if not memory.nbytes(key):
            continue
        with memory.fill(key) as shard:
            store.read_into(extent_of(store, key), shard.numpy().data, check=True)
