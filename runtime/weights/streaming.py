"""Weights during passes: held shards and experts are bound once, others as they arrive over their lanes.

The routing counts of the jobs of a store are kept beside its weights, so that the next job starts with them. They are
advisory: without them, or if they cannot be read, a job starts from zero and generates the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from ...moe.division import MOST_TOKENS, ExpertSeconds
from ...moe.expert import ExpertWeights, HeldExperts
from ...moe.expert_cache import ExpertSlots, Popular, StreamedExperts, StreamingExpertCache
from ...moe.host_experts import HostCounts, HostExperts, StagedExperts
from ...moe.routing_stats import RoutingStats
from ...moe.streaming_mode import Mode, RouterLatency
from ...moe.streaming_order import MAX_TOGETHER, ExpertFetchQueue, ExpertForecast, StreamingOrder
from ...offload.atomic_file import own_name, write_atomically
from ...offload.device import Device, HostMemory, Pinned
from ...offload.store.shard_file import ShardExtent, read_shard
from ...offload.store.store import Store
from ...offload.stream.cuda_lane import CudaLane, StagedLane
from ...offload.stream.reader_lane import DirectFile, HostBytes, ReaderLane, Source, ThreadBuffer, UnalignedFile
from ...offload.stream.stream import (
    ALIGNMENT,
    DENSE,
    HEAD,
    RUNS_OF_A_RING,
    Arrival,
    Lane,
    Ring,
    Shard,
    ShardKey,
    ShardPart,
    ShardStream,
)
from ...quant.matmul import rows
from ...quant.tensor import FLOAT_ALIGNMENT
from ..model.definition import LayerAssembly
from ..model.experts_seam import expert_body
from ..plan.placement import Placement, Plan
from ..settings.stages import Advance
from .memory import WeightMemory

FILE = "note-routing.safetensors"
VERSION = "1"
# Earlier jobs count for at most this many tokens, so that the profile follows what the store is used for.
MAX_TOKENS = 1e6

Profile = dict[str, torch.Tensor]


def profile_shapes(num_experts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the counts of each layer with experts: `chosen` and `tokens`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, count in enumerate(num_experts):
        if count:
            shapes |= {f"layers.{layer}.chosen": (count,), f"layers.{layer}.tokens": (1,)}
    return shapes


def kept(store: Path, wanted: Mapping[str, tuple[int, ...]]) -> Profile:
    """The counts of a store if they have the names and shapes `wanted`; else none."""
    path = store / FILE
    try:
        with safe_open(path, "pt") as file:
            version = (file.metadata() or {}).get("version")
        tensors = load_file(path)
    except (SafetensorError, OSError):
        return {}
    sound = all(bool(tensor.isfinite().all()) and bool((tensor >= 0).all()) for tensor in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return tensors if version == VERSION and sound and shapes == dict(wanted) else {}


def keep(store: Path, counts: Profile) -> None:
    """Replaces the counts of a store; of jobs that ran at the same time, the last one's stay.

    Raises OSError where the store cannot be written to.
    """
    write_atomically(store / FILE, save(counts, {"version": VERSION}), own_name(store / FILE))


class Lanes:
    """A stream of dense shards and one of experts; each is None where no such shard streams. Close it when done."""

    def __init__(self, memory: WeightMemory, plan: Plan, store: Store | None) -> None:
        self._memory = memory
        self._store = store
        # Products of other libraries may round otherwise where matrices begin elsewhere in memory.
        self._shifts = not plan.deterministic
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
        parts = tuple(ShardPart(each.path, each.offset, each.begin, each.nbytes) for each in extent.linked)
        return Shard(name, extent.nbytes, extent.offset, extent.path, extent.crc32, parts, _shift(parts))

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
            if shifts := self._shifts and any(shard.shift for shard in shards):
                # A slot that begins inside a block takes a block more.
                ring += ALIGNMENT * (ring // min(shard.nbytes for shard in shards))
            host = HostMemory(ring)
            self.ring_nbytes.append(host.nbytes)
            return ShardStream(self._readers(shards, host), Ring(ring), host.bytes, shifts)
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
        host: ShardStream[Any] = ShardStream(self._readers(rest, ring), Ring(ring.nbytes), ring.bytes)
        staging = CudaLane(pins.device.cuda, ring.bytes, pinned, memory)
        return StagedLane(host, staging, direct, pins.is_direct)

    def _readers(self, shards: list[Shard], memory: HostMemory) -> ReaderLane:
        sources = {file: self._source(file) for file in {shard.file for shard in shards if not shard.parts}}
        linked = {part.file for shard in shards for part in shard.parts if part.file is not None}
        buffer = ThreadBuffer()
        sources |= {file: UnalignedFile(file, buffer) for file in linked}
        lane = ReaderLane(sources, memory.view)
        self.readers.append(lane)
        return lane

    def _source(self, file: Path | None) -> Source:
        """The bytes of a file, or of the slab, whose end may not be pinned."""
        return HostBytes(self._memory.slab.view) if file is None else DirectFile(file)


def _shift(parts: tuple[ShardPart, ...]) -> int:
    """How far inside a block the slot of a shard begins so that all its parts are read without a copy; 0 if none is."""
    shifts = {(part.offset - part.begin) % ALIGNMENT for part in parts}
    shift = shifts.pop() if len(shifts) == 1 else 0
    return shift if shift % FLOAT_ALIGNMENT == 0 else 0


def _most_together(stream: ShardStream[Any], nbytes: int) -> int:
    """The most experts of `nbytes` that a device computes together: two runs of copies, and a third of the ring."""
    return max(1, min(2 * CudaLane.most_together, stream.ring.capacity // RUNS_OF_A_RING // nbytes))


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


class ModelExperts:
    """The experts of all layers. `cache` streams them; it is None where all experts are held."""

    def __init__(
        self,
        memory: WeightMemory,
        lanes: Lanes,
        layers: Sequence[LayerAssembly],
        stream: Mode | None,
        live: int,
        profile: Profile | None,
        cpu: ExpertSeconds | None = None,
    ) -> None:
        """`live` is the expected number of tokens of a pass; `profile` is what earlier jobs counted.

        None without a store, where no profile is kept and no expert streams. Where experts stream to a device, the CPU
        computes as many as `cpu` says, without it none.
        """
        self._memory = memory
        self._lanes = lanes
        self._layers = layers
        self._stream = stream
        counts = {index: layer.shards.num_experts for index, layer in enumerate(layers) if layer.shards.num_experts}
        self.stats = RoutingStats(counts)
        self._profile = profile or {}
        self._start_from_profile()
        self._biases: dict[ShardKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self.cache = None if lanes.experts is None else self._make_cache(lanes.experts, live, cpu)
        for index, count in counts.items():
            layers[index].set_experts(self._source(index, count))

    @property
    def host(self) -> HostExperts | None:
        """What computes experts by the CPU beside a device."""
        return self.cache.host if self.cache else None

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for the experts that the CPU computes."""
        biases = sum(bias.nbytes for pair in self._biases.values() for bias in pair)
        return self.host.nbytes + biases if self.host else 0

    @property
    def num_held(self) -> int:
        """The number of experts of all layers that are held where they compute."""
        return sum(key in self._memory.held for key in self._memory.experts)

    def start_counting(self) -> None:
        """Passes so far do not belong to the job: a rehearsal ran them with made-up rows."""
        self._start_from_profile()
        self.stats.start_counting()
        if self.cache is not None:
            self.cache.start_counting()
        if self.host is not None:
            self.host.counts = HostCounts()

    @property
    def counts(self) -> Profile:
        """What earlier jobs counted, and this one: the profile of the next job."""
        if self.cache is not None:
            self.cache.settle()
        found: Profile = {}
        for layer, stats in self.stats.layers.items():
            found[f"layers.{layer}.chosen"] = torch.from_numpy(stats.chosen.copy())
            found[f"layers.{layer}.tokens"] = torch.tensor([stats.tokens], dtype=torch.float64)
        return found

    def _start_from_profile(self) -> None:
        for layer, stats in self.stats.layers.items():
            tokens = float(self._profile.get(f"layers.{layer}.tokens", 0.0))
            faded = min(1.0, MAX_TOKENS / max(tokens, 1.0))
            stats.chosen[:] = np.asarray(self._profile.get(f"layers.{layer}.chosen", 0.0)) * faded
            stats.tokens = tokens * faded

    def _source(self, index: int, count: int) -> HeldExperts | StreamedExperts:
        if self.cache is not None:
            shard = self._layers[index].shards.expert
            assert shard is not None
            return StreamedExperts(index, count, self.cache, tuple(matrix.layout for matrix in shard.matrices))
        keys = [ShardKey(index, expert) for expert in range(count)]
        return HeldExperts(index, [self._bind(key, self._memory.shard(key)) for key in keys], self.stats)

    def _make_cache(
        self, stream: ShardStream[torch.Tensor], live: int, cpu: ExpertSeconds | None
    ) -> StreamingExpertCache:
        held = [key for key in self._memory.experts if key in self._memory.held]
        popularity = self.stats.layers
        sizes = {layer: self._memory.nbytes(ShardKey(layer, 0)) for layer in popularity}
        probabilities = {layer: stats.wanted_by(live) for layer, stats in popularity.items()}
        slots = ExpertSlots(held, self._memory, self._bind, Popular(held, sizes, probabilities))
        largest = max(sizes.values())
        order = StreamingOrder(
            ExpertFetchQueue(stream, self._lanes.shard),
            slots.held,
            ExpertForecast(self.stats, self._routers()),
            RouterLatency(
                lambda: stream.lane.seconds_busy,
                lambda: stream.lane.nbytes_moved,
                lambda: stream.lane.seconds_waited,
                largest,
            ),
            most_ahead=stream.ring.capacity // largest + 1,
            forced=self._stream,
            most_divided=MOST_TOKENS if cpu else 0,
            most_together=MAX_TOGETHER if self._memory.device is None else _most_together(stream, largest),
        )
        return StreamingExpertCache(self.stats, order, slots, self._make_host(cpu) if cpu else None)

    def _make_host(self, seconds: ExpertSeconds) -> HostExperts | None:
        """None where the CPU has no kernel for the experts of any layer."""
        gates, scratch = {}, 0
        for layer in self.stats.layers:
            shard, body = self._layers[layer].shards.expert, expert_body(self._layers[layer].experts)
            assert shard is not None
            up, down = (matrix.layout for matrix in shard.matrices)
            # The kernel knows no norm.
            if body.gate is not None and body.norm is None and rows.takes(up, down, body.gate):
                gates[layer], scratch = body.gate, max(scratch, rows.scratch_numbers(up, down))
        if not gates or self._memory.device is None:
            return None
        dtype: torch.dtype = getattr(torch, down.dtype)
        staged = StagedExperts(self._memory.staged, self._staged, gates, down.shape[0], scratch, dtype)
        return HostExperts(self._memory.device, staged, seconds, max(1, torch.get_num_threads() - 1))

    def _staged(self, key: ShardKey) -> ExpertWeights:
        """An expert where it is staged, with its biases in host memory."""
        found = self._bind(key, self._memory.slab.bytes[self._memory.staged[key]])
        if found.up_bias is None or found.down_bias is None:
            return found
        if key not in self._biases:
            self._biases[key] = found.up_bias.cpu(), found.down_bias.cpu()
        return ExpertWeights(found.up, found.down, *self._biases[key])

    def _routers(self) -> dict[int, torch.Tensor]:
        routers = {layer: self._layers[layer].router for layer in self.stats.layers}
        return {layer: router for layer, router in routers.items() if router is not None}

    def _bind(self, key: ShardKey, view: torch.Tensor) -> ExpertWeights:
        return self._layers[key.layer].bind_expert(key.expert, view)


class StreamedWeights:
    """Binds a model's shards to its layers; `arrivals` drives the layers of a pass. Close it when done.

    `memory` has been filled; shards that it does not keep come from `store`.
    """

    def __init__(
        self,
        memory: WeightMemory,
        plan: Plan,
        layers: list[LayerAssembly],
        store: Store | None,
        stream: Mode | None = None,
    ) -> None:
        self.memory = memory
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
            live, profile = plan.max_sequences, self._profile()
            self.experts = ModelExperts(memory, self._lanes, layers, stream, live, profile, plan.cpu_experts)
            opened.pop_all()

    @property
    def head_shard(self) -> torch.Tensor | None:
        return self.memory.shard(HEAD) if HEAD in self.memory.held else None

    @property
    def ring_nbytes(self) -> int:
        """Bytes that were allocated for streamed shards where they compute."""
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
        """Seconds that compute waited in passes so far: for the disk, and for the link to the device."""
        disk, link = self._lanes.seconds_waited
        return disk - self._waited_before[0], link - self._waited_before[1]

    @property
    def nbytes_moved(self) -> int:
        """Bytes read and copied so far, including chunks of shards that are not complete yet."""
        return sum(stream.lane.nbytes_moved for stream in self._lanes.streams)

    def hold_more(self, nbytes: int) -> None:
        """Lets experts that arrive from now on stay in `nbytes` of a CPU's memory, if experts stream."""
        if self.experts.cache is not None:
            self.memory.grow(nbytes)

    def fail(self, cause: BaseException) -> None:
        """Makes all waits for bytes raise StreamBroken from `cause`."""
        for reader in self._lanes.readers:
            reader.fail(cause)

    def start_counting(self) -> None:
        """Forgets the bytes of passes so far."""
        self._not_counted = self._counts()
        self._waited_before = self._lanes.seconds_waited
        self.experts.start_counting()

    def arrivals(self) -> Iterator[int]:
        """Yields the layers of one pass; each is usable until the next one is requested."""
        # Shards come in a fixed order: drain those that an aborted pass left queued.
        deque(self._passing, maxlen=0)
        if self._lanes.dense is not None:
            self._passing = self._lanes.dense.cycle(len(self._arriving))
        for index, layer in enumerate(self._layers):
            if index in self._arriving:
                layer.bind_dense(next(self._passing).view)
            yield index
        deque(self._passing, maxlen=0)

    def leave_last(self) -> None:
        """Between two passes: the last layer is not used any more, and what streams of it is read no more."""
        deque(self._passing, maxlen=0)
        last, dense, cache = len(self._layers) - 1, self._lanes.dense, self.experts.cache
        if dense is not None and last in self._arriving:
            self._arriving.discard(last)
            dense.drop()
            dense.ask(*(self._lanes.shard(ShardKey(layer)) for layer in sorted(self._arriving)))
        if cache is not None and last in self.experts.stats.layers:
            cache.leave(last)

    def close(self) -> None:
        # Which waits for the device: it may still copy rows.
        self._lanes.close()
        if self.experts.host is not None:
            self.experts.host.close()
        if self._store is not None:
            # Best effort: the store may belong to another user, and the disk may be full.
            with suppress(OSError):
                keep(self._store.folder, self.experts.counts)
            self._store.close()

    def _profile(self) -> Profile | None:
        """The routing counts of earlier jobs."""
        if self._store is None:
            return None
        counts = [layer.shards.num_experts for layer in self._layers]
        return kept(self._store.folder, profile_shapes(counts))

    def _counts(self) -> tuple[int, int]:
        streams = self._lanes.streams
        to_device = sum(stream.nbytes_arrived for stream in streams) if self.memory.device else 0
        return sum(stream.nbytes_from_files for stream in streams), to_device


# Reads of shards side by side, whose checksums take as long as their bytes.
_READERS = 4


def fill_from_store(memory: WeightMemory, store: Store, advance: Advance = lambda nbytes: None) -> None:
    """Reads every shard that is kept in memory; `advance` gets the bytes of each. Raises BadStore for a damaged one."""
    lock = Lock()

    def fill(key: ShardKey) -> int:
        # On their way to a device all shards take the same host memory.
        with ExitStack() as opened:
            if memory.device is not None:
                opened.enter_context(lock)
            shard = opened.enter_context(memory.fill(key))
            read_shard(extent_of(store, key), shard.numpy().data)
        return memory.nbytes(key)

    keys = [key for key in (*memory.held, *memory.staged) if memory.nbytes(key)]
    readers = ThreadPoolExecutor(_READERS if memory.device is None else 1)
    try:
        for nbytes in readers.map(fill, keys):
            advance(nbytes)
    finally:
        readers.shutdown(cancel_futures=True)
