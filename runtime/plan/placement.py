"""Which shards are held in memory and how much room the streamed ones pass through. Closed form, torch-free.

KV before experts: while weights do not fit, a byte gives more tokens per second as KV cache, which adds sequences to
every pass, than as a held expert (docs/design.md); so this divides what KV and scratch have left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...quant.kernels.gpu import Gpu, Lacks
from ..settings.errors import DoesNotFit
from ..shape.model_shape import ModelShape
from ..shape.shards import ITEM_NBYTES, ModelShards, resident_nbytes

# Room for streamed experts: enough in flight that the disk never waits for compute, a small part of any budget.
RING_EXPERTS = 24
MIN_RING_EXPERTS = 3
# While threads compute on some experts of a ring others arrive, so a small one makes the disk wait for compute and
# compute for the disk. Measured from 3 experts to 24: from this many on nothing waits (docs/performance.md).
DEEP_RING_EXPERTS = 8
# A layer computes while the next one's dense shard arrives.
RING_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """`held_dense` is how many leading layers keep their dense shard, `held_experts` how many experts each layer keeps.

    Rings are bytes that the other shards pass through, 0 where none do.
    """

    held_dense: int
    held_experts: tuple[int, ...]
    dense_ring: int
    expert_ring: int

    def held_nbytes(self, shards: ModelShards) -> int:
        dense = sum(layer.dense.nbytes for layer in shards.layers[: self.held_dense])
        experts = sum(
            count * layer.expert.nbytes
            for layer, count in zip(shards.layers, self.held_experts, strict=True)
            if layer.expert
        )
        return dense + experts + (shards.head.nbytes if shards.head else 0)

    def nbytes(self, shards: ModelShards) -> int:
        """Host memory that weights take: held, and in flight."""
        return self.held_nbytes(shards) + self.dense_ring + self.expert_ring


def place(shards: ModelShards, room: int, expert_ring: int = 0) -> Placement | None:
    """The placement that holds most in `room` bytes; None where not even the smallest rings fit.

    A deep ring, or one `expert_ring` bytes larger than the smallest, comes before anything is held, as far as there is
    room.
    """
    if shards.nbytes <= room:
        return everything(shards)
    smallest = minimum(shards)
    if smallest.nbytes(shards) > room:
        return None
    deep = (DEEP_RING_EXPERTS - MIN_RING_EXPERTS) * largest_expert(shards)
    ahead = min(max(deep, expert_ring), room - smallest.nbytes(shards))
    smallest = replace(smallest, expert_ring=smallest.expert_ring + ahead)
    dense = _hold_dense(shards, smallest, room)
    ring = _largest_ring(shards, dense, room)
    return _hold_experts(shards, Placement(dense.held_dense, dense.held_experts, dense.dense_ring, ring), room)


def device_ring(shards: ModelShards, room: int) -> int:
    """Bytes, beyond the smallest ring, for experts on their way to a device.

    A layer's worth, so that the link works on while attention computes and while the host waits for what a layer's
    router wants; at most an eighth of `room`, as the rest serves sequences.
    """
    layer = max((layer.num_experts for layer in shards.layers), default=0)
    expert = largest_expert(shards)
    return max(0, min(layer, room // 8 // max(1, expert)) - MIN_RING_EXPERTS) * expert


def stage(shards: ModelShards, held: Placement, room: int) -> Placement | None:
    """What `room` bytes of host memory keep of the shards that stream to a device which holds `held`.

    Counts `held` as kept too, as neither comes from disk. Has rings even where all is kept: what cannot be page-locked
    goes through them (docs/design.md). None where not even the rings fit.
    """
    rings = minimum(shards)
    dense_ring = rings.dense_ring if held.dense_ring else 0
    expert_ring = rings.expert_ring if held.expert_ring else 0
    whole = everything(shards)
    whole = Placement(whole.held_dense, whole.held_experts, dense_ring, expert_ring)
    free = room + held.held_nbytes(shards)
    if whole.nbytes(shards) <= free:
        return whole
    smallest = Placement(held.held_dense, held.held_experts, dense_ring, expert_ring)
    if smallest.nbytes(shards) > free:
        return None
    dense = _hold_dense(shards, smallest, free, keep_ring=True)
    ring = _largest_ring(shards, dense, free) if expert_ring else 0
    return _hold_experts(shards, Placement(dense.held_dense, dense.held_experts, dense_ring, ring), free)


def everything(shards: ModelShards) -> Placement:
    """All shards held."""
    return Placement(len(shards.layers), tuple(layer.num_experts for layer in shards.layers), 0, 0)


def minimum(shards: ModelShards) -> Placement:
    """As little as a pass can do with: the head, and the smallest rings."""
    dense_ring = RING_LAYERS * max(layer.dense.nbytes for layer in shards.layers)
    return Placement(0, (0,) * len(shards.layers), dense_ring, MIN_RING_EXPERTS * largest_expert(shards))


def _hold_dense(shards: ModelShards, smallest: Placement, room: int, keep_ring: bool = False) -> Placement:
    """Every token needs the dense shards, so they are held before any expert; all of them save their ring, too."""
    ring = smallest.dense_ring if keep_ring else 0
    all_dense = Placement(len(shards.layers), smallest.held_experts, ring, smallest.expert_ring)
    if all_dense.nbytes(shards) <= room:
        return all_dense
    free, held = room - smallest.nbytes(shards), smallest.held_dense
    for layer in shards.layers[held:]:
        free -= layer.dense.nbytes
        if free < 0:
            break
        held += 1
    return Placement(held, smallest.held_experts, smallest.dense_ring, smallest.expert_ring)


def _largest_ring(shards: ModelShards, placement: Placement, room: int) -> int:
    expert = largest_expert(shards)
    free = room - placement.nbytes(shards)
    missing = max(0, RING_EXPERTS * expert - placement.expert_ring)
    return placement.expert_ring + min(missing, free // max(expert, 1) * expert)


def _hold_experts(shards: ModelShards, placement: Placement, room: int) -> Placement:
    """The same number of experts in every layer, and one more in the first layers as far as it goes."""
    free, held = room - placement.nbytes(shards), list(placement.held_experts)
    missing = [layer.num_experts - count for layer, count in zip(shards.layers, held, strict=True) if layer.expert]
    each = sum(layer.expert.nbytes for layer in shards.layers if layer.expert)
    if each and (rounds := min(*missing, max(0, free) // each)):
        held = [count + rounds if layer.expert else count for layer, count in zip(shards.layers, held, strict=True)]
        free -= rounds * each
    progress = True
    while progress:
        progress = False
        for index, layer in enumerate(shards.layers):
            if layer.expert and held[index] < layer.num_experts and layer.expert.nbytes <= free:
                held[index] += 1
                free -= layer.expert.nbytes
                progress = True
    return Placement(placement.held_dense, tuple(held), placement.dense_ring, placement.expert_ring)


def largest_expert(shards: ModelShards) -> int:
    """Bytes; 0 where there are none."""
    return max((layer.expert.nbytes for layer in shards.layers if layer.expert), default=0)


MIB = 1 << 20
# Weights as the checkpoint has them, on their way to be packed, and what a shard passes through.
LOADING_NBYTES = 512 * MIB
# What CUDA loads with its first kernels, in either memory: modules, handles and workspaces of cuBLAS.
LIBRARIES_NBYTES = 256 * MIB
# The most that a context takes, for plans that open no device (offload/device.py finds what it really takes).
ASSUMED_CONTEXT_NBYTES = 640 * MIB
WITHOUT_KERNELS = Gpu((0, 0), 1, Lacks.everything("its kernels were never tried on this GPU, `moedge doctor` does so"))


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What a device offers: a budget, of which `context_nbytes` go to the driver and libraries.

    `process_nbytes` is what the process has taken of host memory with CUDA loaded. `gpu` is what kernels go by; without
    one, torch computes everything.
    """

    budget_nbytes: int
    context_nbytes: int
    process_nbytes: int
    gpu: Gpu = WITHOUT_KERNELS


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The device's budget, and where in the host the shards lie that it does not hold.

    `staging` counts the device's own shards as kept; the rest of them lies in host memory, what it does not keep, of
    `disk_nbytes`, on disk. `free_nbytes` of host memory are left.
    """

    budget_nbytes: int
    context_nbytes: int
    staging: Placement
    staged_nbytes: int
    disk_nbytes: int
    free_nbytes: int


def on_device_nbytes(shape: ModelShape, dtype: str) -> int:
    """Bytes that are always on the device: norms, routers, biases; the embedding only where it is the head too."""
    embedding = shape.embedding_numel * ITEM_NBYTES[dtype]
    return resident_nbytes(shape, dtype) - (embedding if shape.head else 0)


def plan_staging(
    shape: ModelShape, shards: ModelShards, held: Placement, device: DeviceRoom, budget: int, dtype: str
) -> DevicePlan:
    """What `budget` bytes of host memory keep for the device. Raises DoesNotFit, naming the smallest that works."""
    fixed = device.process_nbytes + resident_nbytes(shape, dtype) + LOADING_NBYTES
    staging = stage(shards, held, budget - fixed)
    if staging is None:
        rings = minimum(shards)
        smallest = fixed + (rings.dense_ring if held.dense_ring else 0) + (rings.expert_ring if held.expert_ring else 0)
        raise DoesNotFit(
            f"{budget / (1 << 30):.2f} GiB of host memory is too little to stream this model to the device: "
            f"the smallest that works is --ram {-(-smallest // MIB)}MiB"
        )
    staged = staging.held_nbytes(shards) - held.held_nbytes(shards)
    whole = everything(shards).held_nbytes(shards)
    disk = whole - staging.held_nbytes(shards)
    free = budget - fixed - staged - staging.dense_ring - staging.expert_ring
    return DevicePlan(device.budget_nbytes, device.context_nbytes, staging, staged, disk, free)
