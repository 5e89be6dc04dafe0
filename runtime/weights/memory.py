"""The shards that a plan keeps in memory: held where they compute, or staged in the host for copies to the device.

Each tier has one arena, cut into slots as the plan says; a second one has slots for more experts, where the largest
pass left memory. The only record of where each shard is, also after experts were swapped; knows neither how bytes came
there nor what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ...offload.device import Device, HostMemory, Pinned
from ...offload.stream.stream import DENSE, HEAD, ShardKey
from ..plan.placement import Placement
from ..shape.shards import ModelShards


class WeightMemory:
    """`held` shards are used in place; `staged` ones are in `slab` and stream from there to the device.

    On a CPU nothing is staged. All other shards are `on_disk`, except those without bytes, which need no stream.
    """

    def __init__(
        self, shards: ModelShards, held: Placement, staging: Placement | None = None, device: Device | None = None
    ) -> None:
        self.device = device
        self._nbytes = dict(_sizes(shards))
        self.held = self._cut(_kept(shards, held, self._nbytes))
        kept = _kept(shards, staging or held, self._nbytes)
        self.staged = self._cut([key for key in kept if key not in self.held])
        size = _end(self.held)
        self._held_bytes = HostMemory(size).bytes if device is None else device.allocate(size)
        self._more_bytes = HostMemory(0).bytes
        self._free: list[slice] = []
        self.slab = HostMemory(_end(self.staged))
        self._bounce: HostMemory | None = None

    @property
    def streamed(self) -> list[ShardKey]:
        """Shards that are not held, in the order in which a pass uses them."""
        return [key for key, nbytes in self._nbytes.items() if nbytes and key not in self.held]

    @property
    def on_disk(self) -> list[ShardKey]:
        """Shards that are neither held nor staged, in the order in which a pass uses them."""
        return [key for key in self.streamed if key not in self.staged]

    @property
    def experts(self) -> list[ShardKey]:
        """The experts of all layers, held or not."""
        return [key for key, nbytes in self._nbytes.items() if nbytes and key.expert != DENSE]

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        """Copies `entering`, whose bytes are `view`, into the slot of `leaving`, of the same size; returns that slot.

        Where `entering` was staged, `leaving` is copied to the host bytes that staged it.
        """
        slot = self.shard(leaving)
        if (run := self.staged.pop(entering, None)) is not None:
            self.slab.bytes[run].copy_(slot)
            self.staged[leaving] = run
        slot.copy_(view)
        self.held[entering] = self.held.pop(leaving)
        return slot

    def grow(self, nbytes: int) -> None:
        """Adds slots for more experts, of the size of the largest and `nbytes` at most in all; a CPU's memory, once."""
        size = max(map(self.nbytes, self.experts))
        self._more_bytes = HostMemory(nbytes // size * size).bytes
        first = self._held_bytes.numel()
        self._free = [slice(begin, begin + size) for begin in range(first, first + self._more_bytes.numel(), size)]

    def take(self, entering: ShardKey, view: torch.Tensor) -> torch.Tensor | None:
        """Copies `entering`, whose bytes are `view`, into a free slot, and returns it; None where none is free."""
        if not self._free:
            return None
        begin = self._free.pop().start
        self.held[entering] = slice(begin, begin + self.nbytes(entering))
        return self.shard(entering).copy_(view)

    def pin_slab(self) -> Pinned:
        """Page-locks the slab for the device.

        Registrations end where shards end, so that a copy of a shard is inside one of them or outside all.
        """
        assert self.device is not None
        return self.slab.pin(self.device, sorted(run.stop for run in self.staged.values()))

    @property
    def held_nbytes(self) -> int:
        """Bytes that were allocated where weights compute."""
        return self._held_bytes.numel() + self._more_bytes.numel()

    @property
    def nbytes_kept(self) -> int:
        """Bytes of all shards that are held or staged."""
        return _end(self.held) + _end(self.staged)

    def nbytes(self, key: ShardKey) -> int:
        return self._nbytes[key]

    def shard(self, key: ShardKey) -> torch.Tensor:
        """The uint8 bytes of a held shard, where they compute."""
        run, first = self.held[key], self._held_bytes.numel()
        return self._held_bytes[run] if run.start < first else self._more_bytes[run.start - first : run.stop - first]

    @contextmanager
    def fill(self, key: ShardKey) -> Iterator[torch.Tensor]:
        """Host bytes to fill with a shard that is kept in memory; leaving the context moves them to its tier."""
        if key in self.staged:
            yield self.slab.bytes[self.staged[key]]
        elif self.device is None:
            yield self.shard(key)
        else:
            self._bounce = self._bounce or HostMemory(max(map(self.nbytes, self.held)))
            bounce = self._bounce.bytes[: self._nbytes[key]]
            yield bounce
            self.shard(key).copy_(bounce)

    def seal(self) -> None:
        """Frees what `fill` needed, once all shards are filled."""
        self._bounce = None

    def _cut(self, keys: list[ShardKey]) -> dict[ShardKey, slice]:
        begin, cut = 0, {}
        for key in keys:
            cut[key] = slice(begin, begin + self._nbytes[key])
            begin += self._nbytes[key]
        return cut


def _sizes(shards: ModelShards) -> Iterator[tuple[ShardKey, int]]:
    """All shards with their bytes, in the order in which a pass uses them."""
    for index, layer in enumerate(shards.layers):
        yield ShardKey(index), layer.dense.nbytes
        if layer.expert is not None:
            yield from ((ShardKey(index, expert), layer.expert.nbytes) for expert in range(layer.num_experts))
    if shards.head is not None:
        yield HEAD, shards.head.nbytes


def _kept(shards: ModelShards, placement: Placement, keys: Iterable[ShardKey]) -> list[ShardKey]:
    """Those of `keys` that a placement keeps."""
    dense = {HEAD, *(ShardKey(layer) for layer in shards.dense_order[: placement.held_dense])}
    return [
        key for key in keys if (key in dense if key.expert == DENSE else key.expert < placement.held_experts[key.layer])
    ]


def _end(cut: dict[ShardKey, slice]) -> int:
    return max((run.stop for run in cut.values()), default=0)
