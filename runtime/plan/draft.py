"""The sizes of one way to run a job, from which follow whether it fits and what is left for the rest. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...offload.machine.threads import crew_size
from ..kv.spec import KVSpec
from ..shape.layouts import helper_nbytes, resident_nbytes, workspace_nbytes
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, model_shards
from .activations import pass_nbytes
from .cache_size import CacheSize
from .device_plan import DeviceRoom, on_device_nbytes
from .kernel_scratch import attention_nbytes, experts_nbytes, groups_experts
from .placement import Placement, device_ring, everything, minimum, place

# torch, transformers and bitsandbytes imported, threads started, before any model.
PROCESS_NBYTES = 576 << 20
# What allocators keep beside what is asked of them: a share of the activations, and a constant.
SLACK_SHARE = 0.25
SLACK_NBYTES = 48 << 20


@dataclass(frozen=True, slots=True)
class Formats:
    """Of arithmetic, weights and KV cache, the latter in blocks of `kv_block` tokens."""

    dtype: str
    quant: str
    kv: str
    kv_block: int


class Draft:
    """`formats`, passes of `tokens_per_pass` tokens, at most `most_live` sequences of at most `longest` tokens.

    The sizes are of the tier that computes. `fixed` bytes are needed whatever is held, of which `scratch` for what a
    pass computes with.
    """

    def __init__(
        self,
        shape: ModelShape,
        formats: Formats,
        deterministic: bool,
        tokens_per_pass: int,
        most_live: int,
        longest: int,
        device: DeviceRoom | None = None,
    ) -> None:
        self.formats = formats
        self.longest = longest
        self.tokens_per_pass = tokens_per_pass
        self.most_live = max(1, min(most_live, tokens_per_pass))
        self.shards: ModelShards = model_shards(shape, formats.quant, formats.dtype)
        specs = tuple(KVSpec(group, formats.kv, formats.kv_block) for group in shape.kv_groups)
        self.cache = CacheSize(specs, longest, tokens_per_pass)
        computing = pass_nbytes(shape, formats.dtype, tokens_per_pass, self.most_live, longest)
        self.gpu = None if device is None else device.gpu
        self.grouped_experts = self.gpu is not None and groups_experts(shape, formats.quant, self.gpu)
        if self.gpu is not None and self.gpu.has_kernels:
            # Not at the same time: a layer's attention is over when its experts begin.
            attention = attention_nbytes(shape, self.cache, formats.dtype, self.most_live, self.gpu)
            experts = experts_nbytes(shape, formats.dtype, tokens_per_pass) if self.grouped_experts else 0
            computing += max(attention, experts)
        self.scratch = workspace_nbytes(shape, formats.quant, formats.dtype, deterministic)
        if device is None:
            self.scratch += (crew_size() - 1) * helper_nbytes(shape, formats.quant, formats.dtype, deterministic)
        self.scratch += int(computing * (1 + SLACK_SHARE)) + SLACK_NBYTES
        self.on_device = device is not None
        self.fixed = self.scratch + (
            PROCESS_NBYTES + resident_nbytes(shape, formats.dtype)
            if device is None
            else device.context_nbytes + on_device_nbytes(shape, formats.dtype)
        )

    @property
    def smallest(self) -> int:
        """The least budget: one sequence, everything streamed that can be."""
        whole = everything(self.shards).nbytes(self.shards)
        return self.fixed + self.cache.nbytes(1) + min(whole, minimum(self.shards).nbytes(self.shards))

    @property
    def smallest_whole(self) -> int:
        """The least budget that holds all weights, and one sequence."""
        return self.fixed + self.cache.nbytes(1) + self.shards.nbytes

    @property
    def everything(self) -> int:
        """The budget that holds all weights, and all sequences that run together."""
        return self.fixed + self.cache.nbytes(self.most_live) + self.shards.nbytes

    def least_weights(self, budget: int) -> int:
        """Bytes that weights take before the cache gets any: all of them where they fit, else the smallest rings."""
        if self.smallest_whole <= budget:
            return self.shards.nbytes
        rings = self._device_ring(budget) if self.on_device else 0
        return min(self.shards.nbytes, minimum(self.shards).nbytes(self.shards) + rings)

    def place(self, budget: int, kv_nbytes: int) -> Placement | None:
        """Where shards are held, beside a cache of `kv_nbytes`."""
        return place(self.shards, budget - self.fixed - kv_nbytes, self._device_ring(budget) if self.on_device else 0)

    def _device_ring(self, budget: int) -> int:
        return device_ring(self.shards, budget - self.fixed)

    def live(self, budget: int) -> int:
        """Sequences that have room at their longest beside the least weights."""
        return self.cache.sequences_in(budget - self.fixed - self.least_weights(budget), self.most_live)
