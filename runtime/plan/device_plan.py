"""A plan's second tier: what host memory does for a device that computes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.kernels.gpu import Gpu, Lacks
from ..errors import DoesNotFit
from ..shape.layouts import ITEM_NBYTES, resident_nbytes
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards
from .placement import Placement, everything, minimum, stage

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
