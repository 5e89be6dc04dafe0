"""The shards that are kept in memory: held where they compute, or staged in the host for copies to the device.

One arena per tier, cut into slots as the plan says. The only record of which shard is in which slot, also after experts
were swapped; knows neither how bytes get there nor what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...offload.device import Device
from ...offload.host_memory import HostMemory
from ...offload.page_locked import Pinned
from ...offload.stream.lane import DENSE, HEAD, ShardKey
from ..plan.placement import Placement
from ..shape.shards import ModelShards


class WeightMemory:
    """`held` maps a shard that computes where it is to its slot, `staged` one that streams from `slab` to the device.

    On a CPU nothing is staged. All other shards are `on_disk`. Shards without bytes never stream.
    """

    def __init__(
        self, shards: ModelShards, held: Placement, staging: Placement | None = None, device: Device | None = None
    ) -> None:
        self.device = device
        self._nbytes = dict(_sizes(shards))
        self.held = self._cut([key for key in self._nbytes if _keeps(held, key)])
        kept = [key for key in self._nbytes if _keeps(staging or held, key)]
        self.staged = self._cut([key for key in kept if key not in self.held])
        self._held_bytes = _allocate(_end(self.held), device)
        self.slab = HostMemory(_end(self.staged))
        self._bounce: HostMemory | None = None

    @property
    def streamed(self) -> list[ShardKey]:
        """Shards that are not held, in the order in which a pass wants them."""
        return [key for key, nbytes in self._nbytes.items() if nbytes and key not in self.held]

    @property
    def on_disk(self) -> list[ShardKey]:
        """Shards that are neither held nor staged, in the order in which a pass wants them."""
        return [key for key in self.streamed if key not in self.staged]

    @property
    def experts(self) -> list[ShardKey]:
        """The experts of all layers, held or not."""
        return [key for key, nbytes in self._nbytes.items() if nbytes and key.expert != DENSE]

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        """Copies `entering`, whose bytes are `view`, into the slot of `leaving`, of the same size; returns that slot.

        Where `entering` was staged, `leaving` moves to the slot that becomes free in the slab.
        """
        slot = self.shard(leaving)
        if (staged := self.staged.pop(entering, None)) is not None:
            self.slab.bytes[staged].copy_(slot)
            self.staged[leaving] = staged
        slot.copy_(view)
        self.held[entering] = self.held.pop(leaving)
        return slot

    def pin_slab(self) -> Pinned:
        """Page-locks the slab for the device. Registrations end where shards do, so that a copy of a shard is inside
        one of them or outside all."""
        assert self.device is not None
        return self.slab.pin(self.device, sorted(slot.stop for slot in self.staged.values()))

    @property
    def held_nbytes(self) -> int:
        """Bytes that are allocated where weights compute."""
        return self._held_bytes.numel()

    def nbytes(self, key: ShardKey) -> int:
        return self._nbytes[key]

    def shard(self, key: ShardKey) -> torch.Tensor:
        """The slot of a held shard: its uint8 bytes, where they compute."""
        return self._held_bytes[self.held[key]]

    @contextmanager
    def fill(self, key: ShardKey) -> Iterator[torch.Tensor]:
        """Yields host bytes to fill with a shard that is held or staged; on leaving they are copied to its slot."""
        if key in self.staged:
            yield self.slab.bytes[self.staged[key]]
        elif self.device is None:
            yield self.shard(key)
        else:
            self._bounce = self._bounce or HostMemory(max(map(self.nbytes, self.held)))
            buffer = self._bounce.bytes[: self._nbytes[key]]
            yield buffer
            self.shard(key).copy_(buffer)

    def seal(self) -> None:
        """Frees the buffer that filling used; call it when everything is filled."""
        self._bounce = None

    def _cut(self, keys: list[ShardKey]) -> dict[ShardKey, slice]:
        begin, cut = 0, {}
        for key in keys:
            cut[key] = slice(begin, begin + self._nbytes[key])
            begin += self._nbytes[key]
        return cut


def _sizes(shards: ModelShards) -> Iterator[tuple[ShardKey, int]]:
    """Every shard with its size, in the order in which a pass wants them."""
    for index, layer in enumerate(shards.layers):
        yield ShardKey(index), layer.dense.nbytes
        if layer.expert is not None:
            yield from ((ShardKey(index, expert), layer.expert.nbytes) for expert in range(layer.num_experts))
    if shards.head is not None:
        yield HEAD, shards.head.nbytes


def _keeps(placement: Placement, key: ShardKey) -> bool:
    if key == HEAD:
        return True
    if key.expert == DENSE:
        return key.layer < placement.held_dense
    return key.expert < placement.held_experts[key.layer]


def _end(cut: dict[ShardKey, slice]) -> int:
    return max((slot.stop for slot in cut.values()), default=0)


def _allocate(nbytes: int, device: Device | None) -> torch.Tensor:
    return HostMemory(nbytes).bytes if device is None else device.allocate(nbytes)
