"""Keys and values of most sequences in host memory: cohorts of sequences whose blocks cross the link once a pass.

A cohort is a cache of its own, with pools of equal size, in one page-locked slab. One layer of a pool is one run of
bytes, which a stream brings to a window on the device as it brings weights, in the order in which a pass attends. New
keys and values are gathered on the device, cross the link once a layer, and are written into the slab by the host
before the next pass reads it. FlexGen (arXiv 2303.06865) and MoE-Lightning (arXiv 2411.11217) keep them there, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...offload.device import Device, HostMemory
from ...offload.stream.cuda_lane import CudaLane
from ...offload.stream.stream import Ring, Shard, ShardStream
from ...quant.formats.format import Plane
from ...quant.tensor import torch_dtype
from .allocator import BlockTable, TokenSource, Usage
from .cache import KVCache, LayerIndex
from .cohorts import STAGINGS, CohortSizes
from .pool import BlockMemory, KVPool, LayerWindow, blocks_in, planes_of
from .spec import KVSpec

# Stores k, v [T, H, D] of the group's layer in slots int64 [T] of a pool (`StoreFunction` of attention/protocol.py).
Store = Callable[[KVPool, int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CohortMemory:
    """The host memory of cohorts, `slab`, of tokens on their way down, `buffers`, and of `queries` and `results` of the
    CPU's attention; all of it is page-locked.

    Raises MemoryError where the machine refuses that: copies that wait for the host would cost more than they bring.
    """

    def __init__(self, sizes: CohortSizes, device: Device) -> None:
        self.slab = HostMemory(sizes.nbytes)
        self.buffers = [HostMemory(sizes.staging_nbytes) for _ in range(STAGINGS)]
        self.queries, self.results = (HostMemory(sizes.rows_nbytes) for _ in range(2))
        # A copy down writes to one registration.
        whole = [*self.buffers, self.queries, self.results] if sizes.rows_nbytes else self.buffers
        self._all = [*whole, self.slab]
        self._pinned = [memory.pin(device) for memory in self._all]
        *staged, self.pinned = self._pinned
        locked = sum(pinned.nbytes for pinned in self._pinned)
        in_pieces = (len(list(each.pieces(0, part.nbytes))) > 1 for each, part in zip(staged, whole, strict=True))
        if locked < self.nbytes or any(in_pieces):
            self.close()
            raise MemoryError(f"out of memory: {locked:,} of {self.nbytes:,} bytes of keys and values page-locked")

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._all)

    def close(self) -> None:
        """Unlocks the memory; nothing may move any more."""
        while self._pinned:
            self._pinned.pop().close()


class HostBlocks(BlockMemory):
    """Blocks of a cohort; whoever moves whole ones waits until the tokens of the last pass are written."""

    def __init__(self, spec: KVSpec, num_blocks: int, memory: torch.Tensor, settle: Callable[[], None]) -> None:
        super().__init__(planes_of(spec), len(spec.group.layers), num_blocks, memory)
        self._settle = settle

    def get(self, block_id: int) -> torch.Tensor:
        self._settle()
        return super().get(block_id)

    def put(self, block_id: int, content: torch.Tensor) -> None:
        self._settle()
        # Not as `put` does: what a device sends without being waited for is not there yet.
        super().put(block_id, content.cpu())

    def copy(self, source: int, target: int) -> None:
        self._settle()
        super().copy(source, target)


class TokenSlots(NamedTuple):
    """Where the host's tokens of a pass belong in one layer group, int64 [n] each: cohorts, counted from 0, blocks and
    offsets."""

    cohorts: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """New tokens of one layer, which have reached `buffer` once `event` has happened."""

    event: Any
    buffer: HostMemory
    at: LayerIndex
    slots: TokenSlots


class HostKV:
    """The cohorts in host memory, and the way of their keys and values to the device and back.

    A pass calls `begin` with its cohorts; then, layer by layer, it reads each of these through a window once, and gives
    what is new of all of them to `write`. `nbytes_written` went down the link.
    """

    def __init__(
        self, pools: Items[KVPool], sizes: CohortSizes, memory: CohortMemory, device: Device, store: Store
    ) -> None:
        """`pools` are the device's, by layer group."""
        self._device, self._sizes, self._store, self._memory = device, sizes, store, memory
        self._pools, self._specs = pools, [pool.spec for pool in pools]
        # Where the CPU attends, few cohorts cross, and one window is for prompts that begin.
        nbytes = sizes.window_nbytes - sizes.empty_nbytes
        # What no token was stored in must not be NaN.
        self._empty = device.allocate(sizes.empty_nbytes).zero_()
        ring = device.allocate(nbytes)
        lane = CudaLane(device.cuda, memory.slab.bytes, memory.pinned, ring)
        self._stream: ShardStream[torch.Tensor] = ShardStream(lane, Ring(nbytes), ring)
        self.windows = [
            LayerWindow(pool, ring[: count * pool.spec.record_nbytes])
            for pool, count in zip(pools, sizes.blocks, strict=True)
        ]
        # The slab itself, of which the CPU attends to one layer of a cohort at a time.
        self.here = [
            LayerWindow(pool, pool.memory.bytes[: self._shard(1, LayerIndex(group, 0)).nbytes])
            for group, pool in enumerate(self.pools(1))
        ]
        # What is new of a layer, in blocks of its own, so that the kernel that stores it there is the usual one.
        self._staging = device.allocate(sizes.staging_nbytes)
        self._new = [LayerWindow(pool, self._staging[: pool.spec.record_nbytes]) for pool in pools]
        self._buffers = deque(memory.buffers)
        self._written: deque[_Written] = deque()
        self.nbytes_written = 0
        # Tokens and layers to which the CPU attended.
        self.num_attended = 0
        self._waited_before = 0.0

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device."""
        return self._sizes.window_nbytes + self._staging.numel()

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory, all of which are page-locked."""
        return self._memory.nbytes

    @property
    def nbytes_read(self) -> int:
        """Bytes that went up the link."""
        return self._stream.nbytes_arrived

    @property
    def seconds_waited(self) -> float:
        """Seconds that the device waited for cohorts."""
        return self._stream.lane.seconds_waited - self._waited_before

    def start_counting(self) -> None:
        """Resets the counters."""
        self._stream.nbytes_arrived = self.nbytes_written = self.num_attended = 0
        self._waited_before = self._stream.lane.seconds_waited

    def pools(self, cohort: int) -> list[KVPool]:
        """The pools of a cohort, from 1 on, by layer group: to keep and move blocks, not to attend to."""
        pools = []
        for group, (pool, count) in enumerate(zip(self._pools, self._sizes.blocks, strict=True)):
            spec, offsets = pool.spec, None if pool.key_transform is None else pool.key_transform.offsets.cpu()
            begin = self._offset(cohort, LayerIndex(group, 0))
            blocks = HostBlocks(
                spec, count, self._memory.slab.bytes[begin : begin + count * spec.block_nbytes], self.settle
            )
            pools.append(KVPool(spec, count, key_offsets=offsets, memory=blocks))
        return pools

    def begin(self, cohorts: Items[int], layers: Iterable[LayerIndex]) -> None:
        """Asks for the cohorts of a pass in the order in which it attends, once what the last pass wrote is there."""
        self.settle()
        # Of a pass that failed.
        self._stream.drop()
        self._stream.ask(*(self._shard(cohort, at) for at in layers for cohort in cohorts))

    @contextmanager
    def window(self, cohort: int, at: LayerIndex) -> Iterator[None]:
        """While entered, the window of the group has that layer of a cohort."""
        arrival, wanted = self._stream.next(), self._shard(cohort, at)
        try:
            if arrival.shard != wanted:
                raise RuntimeError(f"{arrival.shard.name} arrived where {wanted.name} was to be attended to")
            self.windows[at.group].bind(arrival.view)
            yield
        finally:
            self._stream.done(arrival)

    @contextmanager
    def empty_window(self, at: LayerIndex) -> Iterator[None]:
        """While entered, the window of the group has blocks that nothing was brought to, for prompts that begin."""
        self.windows[at.group].bind(self._empty[: self._shard(1, at).nbytes])
        yield

    def write(self, at: LayerIndex, slots: TokenSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends k, v [n, H, D] of a layer to the host, into `slots`; they are there after `settle`."""
        nbytes = self._nbytes_of(at, slots)
        new = self._new[at.group]
        new.bind(self._staging[:nbytes])
        self._store(new, at.index, torch.arange(len(slots.cohorts), device=k.device), k, v)
        if not self._buffers:
            self._settle_oldest()
        buffer = self._buffers.popleft()
        buffer.bytes[:nbytes].copy_(self._staging[:nbytes], non_blocking=True)
        event = self._device.cuda.Event()
        event.record()
        self._written.append(_Written(event, buffer, at, slots))
        self.nbytes_written += nbytes

    def bind_here(self, cohort: int, at: LayerIndex) -> None:
        """Lets the group's window of `here` have that layer of a cohort."""
        shard = self._shard(cohort, at)
        self.here[at.group].bind(self._memory.slab.bytes[shard.offset : shard.offset + shard.nbytes])

    def attend_here(
        self, q: torch.Tensor, rows: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What `attend` makes of rows int64 [n] of the device's queries q [T, H, D], both [n, H, D] in host memory; the
        result is on its way to the device. All that was written to cohorts before is in its place when it is called."""
        nbytes = len(rows) * q[0].nbytes
        queries, results = (
            memory.bytes[:nbytes].view(q.dtype).view(len(rows), *q.shape[1:])
            for memory in (self._memory.queries, self._memory.results)
        )
        queries.copy_(q[rows], non_blocking=True)
        event = self._device.cuda.Event()
        event.record()
        # Before it the last layer's results went up, too.
        event.synchronize()
        self.settle()
        results.copy_(attend(queries))
        self.num_attended += len(rows)
        return results.to(q.device, non_blocking=True)

    def settle(self) -> None:
        """Returns when all that was written is in its place."""
        while self._written:
            self._settle_oldest()

    def close(self) -> None:
        """Frees the memory, once nothing moves any more."""
        # It waits for compute's copies, too; where they end does not matter any more.
        self._stream.close()
        self._written.clear()
        self._memory.close()

    def _settle_oldest(self) -> None:
        """Moves new tokens from their buffer into the slab, those of all cohorts at once."""
        event, buffer, at, slots = (getattr(self._written[0], each) for each in ("event", "buffer", "at", "slots"))
        event.synchronize()
        spec = self._specs[at.group]
        new = blocks_in(spec, buffer.bytes[: self._nbytes_of(at, slots)])
        rows = torch.arange(len(slots.cohorts))
        block_ids, offsets = rows // spec.block, rows % spec.block
        codes = (spec.layout.keys.codes, spec.layout.values.codes)
        for plane in planes_of(spec):
            if not plane.nbytes:
                continue
            source, target = new.plane(0, plane), self._plane(at, plane)
            if plane in codes:
                target[slots.cohorts, slots.block_ids, :, slots.offsets] = source[block_ids, :, offsets]
            else:
                target[slots.cohorts, slots.block_ids, :, :, slots.offsets] = source[block_ids, :, :, offsets]
        self._buffers.append(buffer)
        self._written.popleft()

    def _plane(self, at: LayerIndex, plane: Plane) -> torch.Tensor:
        """A view [cohorts, blocks, *plane.shape] of one layer in all cohorts."""
        count = self._sizes.blocks[at.group]
        item = torch_dtype(plane.dtype).itemsize
        whole = self._memory.slab.bytes.view(torch_dtype(plane.dtype))
        begin = self._offset(1, at) + plane.offset * count
        inner = torch.empty(plane.shape, device="meta").stride()
        strides = (self._sizes.cohort_nbytes // item, plane.nbytes // item, *inner)
        return whole.as_strided((self._sizes.count, count, *plane.shape), strides, begin // item)

    def _nbytes_of(self, at: LayerIndex, slots: TokenSlots) -> int:
        spec = self._specs[at.group]
        return spec.blocks_for(len(slots.cohorts)) * spec.record_nbytes

    def _offset(self, cohort: int, at: LayerIndex) -> int:
        """The first byte of a layer of a cohort; cohorts follow one another from 1 on."""
        sizes = [count * spec.block_nbytes for count, spec in zip(self._sizes.blocks, self._specs, strict=True)]
        layer = self._sizes.blocks[at.group] * self._specs[at.group].record_nbytes
        return (cohort - 1) * self._sizes.cohort_nbytes + sum(sizes[: at.group]) + at.index * layer

    def _shard(self, cohort: int, at: LayerIndex) -> Shard:
        spec = self._specs[at.group]
        name = f"layer {spec.group.layers[at.index]} of cohort {cohort}"
        return Shard(name, self._sizes.blocks[at.group] * spec.record_nbytes, self._offset(cohort, at))


class CohortCache(KVCache):
    """A cache whose tables live in one of several: its own pools, cohort 0, or those of a cohort in host memory.

    A sequence that starts goes where most of its beginning is stored, else into the first cohort with room.
    """

    def __init__(self, pools: Items[KVPool], host: HostKV, count: int, **options: Any) -> None:
        """`count` cohorts in host memory; `options` are those of `KVCache`."""
        super().__init__(pools, **options)
        self.host_kv = host
        self._all: list[KVCache] = [self]
        for cohort in range(1, count + 1):
            cache = KVCache(host.pools(cohort), **options)
            cache.share_states(self)
            self._all.append(cache)
        # Tables with blocks, by cohort.
        self._open = [0] * (count + 1)
        self.num_moved = 0

    def fits(self, num_tokens: int) -> bool:
        return any(KVCache.fits(cache, num_tokens) for cache in self._all)

    def open(
        self, table: BlockTable, tokens: TokenSource, num_tokens: int, spare: int, shareable: int | None = None
    ) -> bool:
        for cache in self._all:
            cache.sharing = self.sharing
        found = [len(KVCache._find(cache, table, tokens, num_tokens)[0]) for cache in self._all]
        for cohort in sorted(range(len(self._all)), key=lambda each: -found[each]):
            cache, left = self._all[cohort], min(spare, self._open[cohort])
            if KVCache.fits(cache, num_tokens) and KVCache.open(cache, table, tokens, num_tokens, left, shareable):
                table.cohort = cohort
                self._open[cohort] += 1
                return True
        return False

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        return KVCache.grow(self._of(table), table, num_tokens)

    def grow_within_block(self, table: BlockTable) -> bool:
        return KVCache.grow_within_block(self._of(table), table)

    def headroom(self, table: BlockTable) -> int:
        return KVCache.headroom(self._of(table), table)

    def publish(self, table: BlockTable, tokens: TokenSource, prompt: int = 0) -> None:
        KVCache.publish(self._of(table), table, tokens, prompt)

    def retract(self, table: BlockTable) -> None:
        KVCache.retract(self._of(table), table)

    def store(self, table: BlockTable, count: int) -> None:
        KVCache.store(self._of(table), table, count)

    def shrink(self, table: BlockTable) -> None:
        KVCache.shrink(self._of(table), table)

    def fork(self, table: BlockTable) -> BlockTable:
        fork = KVCache.fork(self._of(table), table)
        fork.cohort = table.cohort
        self._open[table.cohort] += 1
        return fork

    def release(self, table: BlockTable) -> None:
        self._open[table.cohort] -= bool(table.blocks)
        KVCache.release(self._of(table), table)
        table.cohort = 0

    def move(self, table: BlockTable) -> bool:
        for cohort, cache in enumerate(self._all):
            if cohort != table.cohort and cache.takes(table, self._of(table), self._open[cohort]):
                self._open[table.cohort] -= 1
                self._open[cohort] += 1
                table.cohort = cohort
                self.num_moved += 1
                return True
        return False

    def usage(self, tables: Iterable[BlockTable]) -> Usage:
        usage, tables = Usage(), list(tables)
        for cohort, cache in enumerate(self._all):
            usage.add(KVCache.usage(cache, (table for table in tables if table.cohort == cohort)))
        return usage

    def _of(self, table: BlockTable) -> KVCache:
        return self._all[table.cohort]
