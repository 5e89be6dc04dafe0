"""An engine run of a tiny checkpoint on any device, and the plans that put its weights on one, two or three tiers."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moedge.moe.expert_cache import CacheCounts
from moedge.moe.host_experts import HostCounts
from moedge.moe.streaming_mode import Mode
from moedge.offload.device import Device
from moedge.quant.formats.format import CALIBRATED
from moedge.quant.kernels.gpu import OLDEST_CAPABILITY, Gpu, Lacks
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs.report import experts as experts_of
from moedge.runtime.jobs.summary import Experts
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import LOADING_NBYTES, Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import LIBRARIES_NBYTES, DeviceBudget, MemoryBudget, Settings
from moedge.runtime.shape.shards import model_shards, resident_nbytes
from moedge.runtime.source.model_source import ModelSource
from moedge.runtime.weights.importance import Importance

AMPLE = 1 << 36


@dataclass(frozen=True)
class Ran:
    """What a run gave and moved."""

    tokens: list[list[int]]
    passes: int
    from_disk: int
    to_device: int
    experts: Experts
    parked: int
    pinned_for_parking: int
    by_host: tuple[HostCounts, CacheCounts] | None = None


@dataclass(frozen=True)
class Case:
    """A tiny model, in a checkpoint and in a store, and how it is run."""

    source: ModelSource
    store: Path
    settings: Settings
    lengths: tuple[int, ...] = (3, 40, 17)
    new_tokens: int = 6

    @property
    def job(self) -> Workload:
        return Workload(len(self.lengths), max(self.lengths) + self.new_tokens)

    @property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(5, 380, (length,), generator=generator).tolist() for length in self.lengths]

    def plan(self, device: Device | None, share: float = 1.0, ram: int = AMPLE) -> Plan:
        """With `share` of the way from the smallest budget on the device to the one that holds everything."""
        if device is None:
            return make_plan(self.source.shape, self.settings, MemoryBudget(ram), self.job)
        # As runtime/loading/machine_memory.py counts, which finds libraries loaded.
        room = DeviceBudget(0, device.context_nbytes + LIBRARIES_NBYTES, 0, gpu_of(device))
        smallest, whole = budget_range(self.source.shape, self.settings, self.job, room)
        # More than holds everything with a single sequence: else a plan may stream a little for another one.
        whole += 64 << 20 if share == 1.0 else 0
        room = replace(room, nbytes=smallest + int(share * (whole - smallest)))
        return make_plan(self.source.shape, self.settings, MemoryBudget(ram, room), self.job)

    def three_tiers(self, device: Device) -> Plan:
        """The least that is held on the device, and host memory for two thirds of what streams."""
        plan, shape, dtype = self.plan(device, 0.0), self.source.shape, self.settings.dtype
        assert plan.staging is not None
        rings = plan.staging.placement.dense_ring + plan.staging.placement.expert_ring
        fixed = LOADING_NBYTES + resident_nbytes(shape, dtype) + rings
        return self.plan(device, 0.0, fixed + plan.staging.staged_nbytes * 2 // 3)

    def held(self, device: Device | None, share: float, on_disk: bool = True) -> Plan:
        """The smallest rings, and `share` of all experts held; the rest on disk, or staged in host memory.

        With a device and `on_disk`, half of the others is staged.
        """
        plan = self.plan(device, 0.0) if device else self.plan(None, ram=self.smallest)
        counts = [layer.num_experts for layer in model_shards(self.source.shape, self.settings.quant, "fp32").layers]
        held = spread(counts, round(share * sum(counts)))
        ring = 0 if held == tuple(counts) else plan.placement.expert_ring
        plan = replace(plan, placement=replace(plan.placement, held_experts=held, expert_ring=ring))
        if plan.staging is None:
            return plan
        staged = tuple(mine + (count - mine) // 2 for mine, count in zip(held, counts, strict=True))
        staging = replace(plan.staging.placement, held_experts=staged if on_disk else tuple(counts), expert_ring=ring)
        return replace(plan, staging=replace(plan.staging, placement=staging, disk_nbytes=int(on_disk)))

    @property
    def smallest(self) -> int:
        return budget_range(self.source.shape, self.settings, self.job)[0]

    def run(
        self,
        plan: Plan,
        device: Device | None = None,
        temperature: float = 0.0,
        stream: Mode | None = Mode.ALL,
        loaded_now: Callable[[], object] = lambda: None,
    ) -> Ran:
        """`loaded_now` is called between loading and the first pass."""
        store = self.store if plan.streams or importance_for(self.settings.quant) else None
        with closing(load_engine(self.source, plan, store, device, stream)) as loaded:
            loaded_now()
            sequences = [Sequence(ids, self.params(index, temperature)) for index, ids in enumerate(self.prompts)]
            for sequence in sequences:
                loaded.engine.add(sequence)
            list(loaded.engine.run())
            streamed = loaded.streamed
            tokens = [sequence.output_ids for sequence in sequences]
            moved = streamed.nbytes_from_disk, streamed.nbytes_to_device
            counted = experts_of(loaded, self.source.shape.num_experts)
            pinned = sum(pinned.nbytes for pinned in loaded.parking._pinned)
            parked = loaded.engine.scheduler.counts.parked
            cache = streamed.experts.cache
            by_host = None if cache is None or cache.host is None else (cache.host.counts, cache.counts)
            return Ran(tokens, loaded.engine.metrics.passes, *moved, counted, parked, pinned, by_host)

    def params(self, seed: int, temperature: float) -> SequenceSampling:
        return SequenceSampling(self.new_tokens, temperature=temperature, seed=seed, ignore_eos=True)


def spread(counts: list[int], total: int) -> tuple[int, ...]:
    """`total` experts over the layers, evenly; what is left over goes to the first."""
    held = [0] * len(counts)
    while sum(held) < total:
        for layer, count in enumerate(counts):
            if held[layer] < count and sum(held) < total:
                held[layer] += 1
    return tuple(held)


def gpu_of(device: Device) -> Gpu:
    """As `usable_kernels`, without trying one: a fake device runs none before it is entered."""
    old = "no kernel is compiled for it" if device.capability < OLDEST_CAPABILITY else ""
    return Gpu(device.capability, device.processors, Lacks.everything(old))


def importance_for(quant: str) -> Importance | None:
    """What a store is made with whose experts are never packed without one: columns count alike."""
    return Importance("all alike", {}) if quant.partition("+")[2] in CALIBRATED else None


def exact(quant: str) -> Settings:
    return Settings(dtype="fp32", quant=quant, kv="fp32", tokens_per_pass=64, max_sequences=3, deterministic=True)
