"""The sizes of one way to run a job, from which follow whether it fits and what is left for the rest. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...offload.machine.hardware import crew_size
from ...quant.scratch import whole_vectors
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, helper_nbytes, model_shards, resident_nbytes, workspace_nbytes
from .activations import Widest, attention_nbytes, decoding_nbytes, experts_nbytes, groups_experts, pass_nbytes
from .cache_size import CacheSize
from .pass_cost import ComputeCosts, ModelWork
from .placement import DeviceRoom, Placement, device_ring, everything, minimum, on_device_nbytes, place
from .plan import Plan, Workload
from .predict import Prediction, live_sequences, phases_of, predict
from .rates import Rates

# torch, transformers and bitsandbytes imported, threads started, before any model.
PROCESS_NBYTES = 576 << 20
# What allocators keep beside what is asked of them: a share of the activations, and a constant.
SLACK_SHARE = 0.25
SLACK_NBYTES = 72 << 20


class WeightFootprint:
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


class Candidate:
    """Passes of `tokens_per_pass` tokens and at most `live` sequences, over a cache.

    The sizes are of the tier that computes. `fixed` bytes are needed whatever is held, of which `scratch` for what a
    pass computes with.
    """

    def __init__(self, packed: WeightFootprint, cache: CacheSize, live: int) -> None:
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


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """What predictions rest on: the machine's rates, and by weight format the factors that earlier runs taught."""

    rates: Rates = field(default_factory=Rates)
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def predict(self, draft: Candidate, plan: Plan, job: Workload) -> Prediction:
        return predict(draft.packed.work, plan, job, self.rates, self.factors.get(plan.quant, {}))


@dataclass(frozen=True, slots=True)
class _Formats:
    """Of a draft, by the names that a plan has for them."""

    dtype: str
    quant: str
    compute: str
    kv: str
    kv_block: int


@dataclass(frozen=True, slots=True)
class _Passes:
    """`count` alike: seconds that each computes, and the least share of weights that are not held that it brings in."""

    count: float
    compute_s: float
    wanted: float


class CostCache:
    """A model in the formats that are asked for; what no budget changes is worked out once."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._packed: dict[tuple[object, ...], WeightFootprint] = {}
        self._passes: dict[tuple[object, ...], list[_Passes]] = {}

    def packed(self, quant: str, dtype: str, deterministic: bool, device: DeviceRoom | None) -> WeightFootprint:
        key = (quant, dtype, deterministic, device and (device.context_nbytes, device.gpu))
        if key not in self._packed:
            self._packed[key] = WeightFootprint(self.shape, quant, dtype, deterministic, device)
        return self._packed[key]

    def least_seconds(
        self, draft: Candidate, compute: str, blocks: tuple[int, ...], room: int, job: Workload, speed: Speed
    ) -> float:
        """No plan of the draft is predicted to take less, with a cache of `blocks` and `room` bytes for weights.

        At best all of the room holds weights and no resource waits for another. Of the rest every pass brings in at
        least the share that it wants of the experts that are wanted least.
        """
        packed, factors, rates = draft.packed, speed.factors.get(draft.packed.quant, {}), speed.rates
        missing = max(0, packed.nbytes - room)
        name, rate = ("link", rates.link_bytes_s) if packed.on_device else ("disk", rates.disk_bytes_s)
        moved, computed = missing / rate * factors.get(name, 1.0), factors.get("compute", 1.0)
        return sum(
            each.count * max(each.compute_s * computed, each.wanted * moved)
            for each in self._passes_of(draft, compute, blocks, job, speed)
        )

    def _passes_of(
        self, draft: Candidate, compute: str, blocks: tuple[int, ...], job: Workload, speed: Speed
    ) -> list[_Passes]:
        work, spec = draft.packed.work, draft.cache.specs[0]
        live = live_sequences(draft.cache.specs, blocks, draft.live, job)
        formats = _Formats(draft.packed.dtype, draft.packed.quant, compute, spec.format, spec.block)
        key = (speed, job, work, formats, draft.tokens_per_pass, live)
        if key not in self._passes:
            costs = ComputeCosts(work, formats, speed.rates)
            self._passes[key] = [
                _Passes(phase.passes, costs.seconds(phase.load), work.least_wanted(phase.load.tokens))
                for phase in phases_of(job, live, draft.tokens_per_pass)
            ]
        return self._passes[key]
