"""The lanes of streamed shards: from disk into host memory, or through pinned host memory to the device.

The only file that chooses between lanes; streams, events and threads belong to the lanes.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...offload.device import Device
from ...offload.host_memory import HostMemory
from ...offload.page_locked import Pinned
from ...offload.store.shard_file import ShardExtent
from ...offload.store.store import Store
from ...offload.stream.cuda_lane import CudaLane
from ...offload.stream.lane import DENSE, HEAD, Lane, Ring, Shard, ShardKey
from ...offload.stream.reader_lane import DirectFile, HostBytes, ReaderLane, Source
from ...offload.stream.staged_lane import StagedLane
from ...offload.stream.stream import ShardStream
from ..plan.placement import Placement, Plan
from .memory import WeightMemory


class Lanes:
    """A stream of dense shards and one of experts; each is None where no such shard streams. Close it when done."""

    def __init__(self, memory: WeightMemory, plan: Plan, store: Store | None) -> None:
        self._memory = memory
        self._store = store
        self.readers: list[ReaderLane] = []
        self._copiers: list[CudaLane] = []
        self.ring_nbytes: list[int] = []
        dense = [key for key in memory.streamed if key.expert == DENSE]
        experts = [key for key in memory.streamed if key.expert != DENSE]
        self._pins: _Pins | None = None
        self.dense: ShardStream[Any] | None = None
        self.experts: ShardStream[Any] | None = None
        # If some experts come from the disk, any expert may: which ones are held changes from pass to pass.
        may_come = memory.experts if any(key.expert != DENSE for key in memory.on_disk) else experts
        with ExitStack() as opened:
            opened.callback(self.close)
            if memory.device and plan.staging:
                self._pins = _Pins(memory, plan.staging.placement, dense, experts)
            self.dense = self._open(dense, plan.placement.dense_ring, 0)
            self.experts = self._open(may_come, plan.placement.expert_ring, 1)
            opened.pop_all()
        if self.dense is not None:
            self.dense.ask(*map(self.shard, dense))

    @property
    def streams(self) -> list[ShardStream[Any]]:
        return [stream for stream in (self.dense, self.experts) if stream is not None]

    @property
    def seconds_waited(self) -> tuple[float, float]:
        """Seconds that compute waited for bytes: for readers, and for copies to the device."""
        disk = sum(reader.seconds_waited for reader in self.readers)
        return disk, sum(copier.seconds_waited for copier in self._copiers)

    def shard(self, key: ShardKey) -> Shard:
        """Where to read the bytes of a shard that is not held."""
        if run := self._memory.staged.get(key):
            return Shard(f"layer {key.layer} shard {key.expert}", self._memory.nbytes(key), run.start)
        assert self._store is not None
        extent = extent_of(self._store, key)
        name = f"{extent.path.name} {extent.tensor} {extent.index}"
        return Shard(name, extent.nbytes, extent.offset, extent.path, extent.crc32)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        if self._pins is not None:
            self._pins.close()

    def _open(self, keys: list[ShardKey], ring: int, kind: int) -> ShardStream[Any] | None:
        if not keys:
            return None
        shards = [self.shard(key) for key in keys]
        if self._pins is None:
            host = HostMemory(ring)
            self.ring_nbytes.append(host.nbytes)
            return ShardStream(self._readers(shards, host), Ring(ring), host.bytes)
        device = self._pins.device
        memory = device.allocate(ring)
        self.ring_nbytes.append(memory.numel())
        return ShardStream(self._copies(shards, memory, self._pins, kind), Ring(ring), memory)

    def _copies(self, shards: list[Shard], memory: Any, pins: _Pins, kind: int) -> Lane[Any]:
        direct = CudaLane(pins.device.cuda, self._memory.slab.bytes, pins.slab, memory)
        self._copiers.append(direct)
        rest = [shard for shard in shards if not pins.is_direct(shard)]
        if not rest:
            return direct
        ring, pinned = pins.rings[kind]
        host = ShardStream(self._readers(rest, ring), Ring(ring.nbytes), ring.bytes)
        staging = CudaLane(pins.device.cuda, ring.bytes, pinned, memory)
        return StagedLane(host, staging, direct, pins.is_direct)

    def _readers(self, shards: list[Shard], memory: HostMemory) -> ReaderLane:
        sources = {file: self._source(file) for file in {shard.file for shard in shards}}
        lane = ReaderLane(sources, memory.view)
        self.readers.append(lane)
        return lane

    def _source(self, file: Path | None) -> Source:
        """The bytes of a file, or of the slab, whose end may not be pinned."""
        return HostBytes(self._memory.slab.view) if file is None else DirectFile(file)


class _Pins:
    """The page-locked host memory: the slab alone where that suffices, else the rings first, then the slab.

    Through pinned rings everything can be streamed to the device, at the cost of a copy in the host.
    """

    def __init__(
        self, memory: WeightMemory, staging: Placement, dense: list[ShardKey], experts: list[ShardKey]
    ) -> None:
        assert memory.device is not None
        self.device: Device = memory.device
        self.rings: list[tuple[HostMemory, Pinned]] = []
        self.slab = memory.pin_slab()
        with ExitStack() as opened:
            # Memory that is freed while it is registered could never be pinned again at its addresses.
            opened.callback(self.close)
            if memory.on_disk or self.slab.nbytes < memory.slab.nbytes:
                self.slab.close()
                for keys, nbytes in ((dense, staging.dense_ring), (experts, staging.expert_ring)):
                    ring = HostMemory(nbytes if keys else 0)
                    self.rings.append((ring, ring.pin(self.device)))
                self.slab = memory.pin_slab()
            opened.pop_all()

    def is_direct(self, shard: Shard) -> bool:
        """Whether the device can copy the shard directly from the pinned slab."""
        return shard.file is None and shard.offset + shard.nbytes <= self.slab.nbytes

    def close(self) -> None:
        self.slab.close()
        for _, pinned in self.rings:
            pinned.close()


def extent_of(store: Store, key: ShardKey) -> ShardExtent:
    """The extent of a shard in a store."""
    layer = store.layers[key.layer]
    extent = store.head if key == HEAD else layer.dense if key.expert == DENSE else layer.experts[key.expert]
    assert extent is not None
    return extent
