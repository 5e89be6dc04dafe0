"""The sizes of one way to run a job, from which follow whether it fits and what is left for the rest. Torch-free."""

from __future__ import annotations

from functools import cached_property

from ...offload.machine.threads import crew_size
from ...quant.scratch import whole_vectors
from ..shape.layouts import helper_nbytes, resident_nbytes, workspace_nbytes
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, model_shards
from .activations import Widest, decoding_nbytes, pass_nbytes
from .cache_size import CacheSize
from .device_plan import DeviceRoom, on_device_nbytes
from .kernel_scratch import attention_nbytes, experts_nbytes, groups_experts
from .pass_cost import ModelWork
from .placement import Placement, device_ring, everything, minimum, place

# torch, transformers and bitsandbytes imported, threads started, before any model.
PROCESS_NBYTES = 576 << 20
# What allocators keep beside what is asked of them: a share of the activations, and a constant.
SLACK_SHARE = 0.25
SLACK_NBYTES = 72 << 20


class Packed:
    """A model in one weight format on the tier that computes: what takes the same bytes in every draft."""

    def __init__(
        self, shape: ModelShape, quant: str, dtype: str, deterministic: bool, device: DeviceRoom | None
    ) -> None:
        self.shape = shape
        self.quant = quant
        self.dtype = dtype
        self.shards: ModelShards = model_shards(shape, quant, dtype)
        self.work = ModelWork(shape, self.shards)
        self.widest = Widest.of(shape)
        self.on_device = device is not None
        self.pads_passes = deterministic and not self.on_device
        self.gpu = None if device is None else device.gpu
        self.grouped_experts = self.gpu is not None and groups_experts(shape, quant, self.gpu)
        self.products = workspace_nbytes(shape, quant, dtype, deterministic)
        if device is None:
            self.products += (crew_size() - 1) * helper_nbytes(shape, quant, dtype, deterministic)
            self.resident = PROCESS_NBYTES + resident_nbytes(shape, dtype)
        else:
            self.resident = device.context_nbytes + on_device_nbytes(shape, dtype)

    @cached_property
    def nbytes(self) -> int:
        """Of all weights."""
        return self.shards.nbytes

    @cached_property
    def streaming_nbytes(self) -> int:
        """The least that weights take: everything streamed that can be."""
        return min(everything(self.shards).nbytes(self.shards), minimum(self.shards).nbytes(self.shards))


class Draft:
    """Passes of `tokens_per_pass` tokens and at most `live` sequences, over a cache.

    The sizes are of the tier that computes. `fixed` bytes are needed whatever is held, of which `scratch` for what a
    pass computes with.
    """

    def __init__(self, packed: Packed, cache: CacheSize, live: int) -> None:
        self.packed = packed
        self.cache = cache
        self.tokens_per_pass = cache.tokens_per_pass
        self.live = max(1, min(live, self.tokens_per_pass))
        rows = whole_vectors(self.tokens_per_pass) if packed.pads_passes else self.tokens_per_pass
        computing = pass_nbytes(packed.widest, packed.dtype, rows, self.live, cache.longest)
        decoding = decoding_nbytes(packed.widest, packed.dtype, self.live, cache.longest)
        # Not at the same time: a layer's attention is over when its experts begin, and one backend computes it.
        if packed.gpu is not None and not packed.gpu.lacks.attention:
            decoding = max(decoding, attention_nbytes(packed.shape, cache, packed.dtype, self.live, packed.gpu))
        if packed.grouped_experts:
            decoding = max(decoding, experts_nbytes(packed.shape, packed.dtype, self.tokens_per_pass))
        computing += decoding
        self.scratch = packed.products + int(computing * (1 + SLACK_SHARE)) + SLACK_NBYTES
        self.fixed = self.scratch + packed.resident

    @property
    def smallest(self) -> int:
        """The least budget: one sequence, everything streamed that can be."""
        return self.fixed + self.cache.nbytes(1) + self.packed.streaming_nbytes

    @property
    def smallest_whole(self) -> int:
        """The least budget that holds all weights, and one sequence."""
        return self.fixed + self.cache.nbytes(1) + self.packed.nbytes

    def whole(self, num_sequences: int) -> int:
        """The budget that holds all weights, and so many sequences at their longest."""
        return self.fixed + self.cache.nbytes(num_sequences) + self.packed.nbytes

    def place(self, budget: int, kv_nbytes: int) -> Placement | None:
        """Where shards are held, beside a cache of `kv_nbytes`; None where that does not fit."""
        ring = device_ring(self.packed.shards, budget - self.fixed) if self.packed.on_device else 0
        return place(self.packed.shards, budget - self.fixed - kv_nbytes, ring)
