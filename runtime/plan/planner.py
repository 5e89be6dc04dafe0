"""Chooses precision, cache, passes and placement for a model, a job and a budget: the fastest by predicted time of all
that the settings leave open, found by branch and bound. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...quant.kernels.gpu import interpreted
from ..attention.choice import AttentionNeeds, choose_attention, stores_by_kernel
from ..settings.errors import DoesNotFit, SettingError
from ..shape.model_shape import ModelShape
from ..shape.shards import resident_nbytes
from .candidate import Candidate, CostCache, Speed, WeightFootprint
from .placement import DeviceRoom, Placement, plan_staging
from .plan import Plan, Settings, Workload
from .predict import Prediction
from .search_space import GIB, MIB, SearchSpace, dtype_notes

__all__ = ["Choice", "Plan", "Settings", "Speed", "budget_range", "choose", "make_plan"]

# A less lossy weight format is taken as long as it takes no more than this times as long as the fastest.
WORTH = 1.5
# What the same sum may differ by, added up in two ways.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that was taken, what is expected of it, and what the best plan in every weight format would take."""

    plan: Plan
    prediction: Prediction
    seconds: Mapping[str, float]


def make_plan(
    shape: ModelShape, settings: Settings, host_budget: int, job: Workload, device: DeviceRoom | None = None
) -> Plan:
    """The plan within `host_budget` bytes, and a device's, where there is one, for a machine that nobody measured."""
    return choose(shape, settings, host_budget, job, device, Speed()).plan


def choose(
    shape: ModelShape,
    settings: Settings,
    host_budget: int,
    job: Workload,
    device: DeviceRoom | None = None,
    speed: Speed | None = None,
    disk: int | None = None,
    model: CostCache | None = None,
) -> Choice:
    """The best plan within `host_budget` bytes, and a device's, where there is one.

    `disk` bytes bound a store of weights that stream from there; None is as much as it takes. `model` is what earlier
    choices for this shape worked out.

    Raises DoesNotFit, naming the smallest budget that works. Where the job's longest rows do not fit, the cache is as
    large as it can be; `kv_tokens` says which rows fail.
    """
    if device is not None and settings.compute == "int8":
        raise SettingError("--compute int8 multiplies on the processor; give --gpu-mem 0 with it")
    search = _Search(SearchSpace(shape, settings, job, device, model), host_budget, speed or Speed(), disk)
    best: dict[str, tuple[Plan, Prediction]] = {}
    for quant in search.drafting.quants:
        if found := search.best(quant):
            best[quant] = found
        if quant == search.drafting.quants[0] and found and search.holds_everything(found[0]):
            # The checkpoint's own precision, and nothing is short of memory.
            break
    if not best:
        # A device's rest does not fit the host, or a store the disk.
        raise search.refusal
    seconds = {quant: prediction.seconds for quant, (_, prediction) in best.items()}
    fastest = min(seconds.values())
    taken = next(quant for quant in best if seconds[quant] <= WORTH * fastest)
    return Choice(*best[taken], seconds)


def budget_range(
    shape: ModelShape, settings: Settings, job: Workload, device: DeviceRoom | None = None
) -> tuple[int, int]:
    """The smallest budget of the tier that computes with which every row works, and that which holds all weights."""
    drafting = SearchSpace(shape, settings, job, device)
    draft = drafting.draft(drafting.smallest_quant)
    return draft.smallest, draft.smallest_whole


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A draft that fits, with its cache, and the seconds that it takes at least; `index` is its place in the search."""

    least_seconds: float
    index: int
    draft: Candidate
    cached: int


class _Search:
    """Of every number of tokens and of sequences in a pass; held shards take what these leave.

    What a candidate takes at least is known before its shards are placed, so the search goes from the most promising
    on, and ends where the next could not be faster than what was found.
    """

    def __init__(self, drafting: SearchSpace, host_budget: int, speed: Speed, disk: int | None) -> None:
        self.drafting = drafting
        self._disk = disk
        self._host_budget = host_budget
        self._speed = speed
        self._budget = host_budget if drafting.device is None else drafting.device.budget_nbytes
        self._longest = drafting.longest(self._budget)
        self.refusal = DoesNotFit("no plan was found")

    def best(self, quant: str) -> tuple[Plan, Prediction] | None:
        """The fastest plan in a weight format; of plans that are equally fast, that with the smaller passes."""
        best: tuple[float, int, Plan, Prediction] | None = None
        for each in sorted(self._candidates(quant), key=lambda each: (each.least_seconds, each.index)):
            if best and each.least_seconds * (1 - ROUNDING) > best[0]:
                break
            if plan := self._plan(each):
                told = self._speed.predict(each.draft, plan, self.drafting.job)
                if best is None or (told.seconds, each.index) < best[:2]:
                    best = told.seconds, each.index, plan, told
        return best and best[2:]

    def holds_everything(self, plan: Plan) -> bool:
        """Whether all weights are where they compute, and every sequence that runs has its blocks."""
        held = plan.placement.dense_ring + plan.placement.expert_ring == 0
        return held and plan.kv_sequences >= plan.max_sequences

    def _candidates(self, quant: str) -> Iterator[_Ranked]:
        drafting, index = self.drafting, 0
        for tokens in drafting.tokens():
            for live in drafting.lives(tokens):
                draft = self._draft(quant, tokens, live)
                cached = self._cached(draft)
                blocks = draft.cache.blocks(cached)
                room = self._budget - draft.fixed - draft.cache.nbytes_of(blocks)
                if room < draft.packed.streaming_nbytes:
                    break
                least = drafting.model.least_seconds(
                    draft, drafting.settings.compute, blocks, room, drafting.job, self._speed
                )
                yield _Ranked(least, index, draft, cached)
                index += 1

    def _has_disk(self, packed: WeightFootprint) -> bool:
        store = packed.nbytes + resident_nbytes(packed.shape, packed.dtype)
        if self._disk is None or store <= self._disk:
            return True
        self.refusal = DoesNotFit(
            f"in {packed.quant} this model's weights do not fit the memory, and their store of {store / GIB:.2f} GiB "
            f"does not fit --disk {self._disk / GIB:.2f} GiB; give --disk {-(-store // MIB)}MiB, or more memory"
        )
        return False

    def _draft(self, quant: str, tokens: int, live: int) -> Candidate:
        """Nothing is gained by fewer bits of keys and values where all have room without them."""
        drafting = self.drafting
        if drafting.settings.kv == "auto":
            native = drafting.draft(quant, self._longest, tokens, live, drafting.dtype)
            if native.whole(min(drafting.most_live, tokens)) <= self._budget:
                return native
        return drafting.draft(quant, self._longest, tokens, live)

    def _plan(self, candidate: _Ranked) -> Plan | None:
        """None, and why in `refusal`, where the host has no room for a device's rest, or the disk for a store."""
        try:
            plan = self._placed(candidate.draft, candidate.cached)
        except DoesNotFit as refusal:
            self.refusal = refusal
            return None
        return None if plan.streams and not self._has_disk(candidate.draft.packed) else plan

    def _placed(self, draft: Candidate, cached: int) -> Plan:
        """Raises DoesNotFit where the host has no room for a device's rest."""
        placement = draft.place(self._budget, draft.cache.nbytes(cached))
        assert placement is not None, "a candidate has room for the least that weights take"
        plan = _finish(draft, self.drafting, placement, cached)
        device = self.drafting.device
        if device is None:
            return replace(plan, budget_nbytes=self._host_budget, free_nbytes=self._host_budget - plan.used_nbytes)
        shards = draft.packed.shards
        staged = plan_staging(draft.packed.shape, shards, placement, device, self._host_budget, plan.dtype)
        # Where every sequence has room at its longest, none is preempted.
        waits = plan.kv_sequences < plan.max_sequences and staged.disk_nbytes == 0
        parked = draft.cache.parked(plan.kv_blocks, staged.free_nbytes if waits else 0)
        free = staged.free_nbytes - draft.cache.nbytes_of(parked)
        return replace(plan, budget_nbytes=self._host_budget, device=staged, parked_blocks=parked, free_nbytes=free)

    def _cached(self, draft: Candidate) -> int:
        """Where all weights have room, blocks take what is left: nothing else could use it."""
        least = self.drafting.cached(draft.live, draft.cache.longest)
        if draft.whole(least) > self._budget:
            return least
        room = self._budget - draft.fixed - draft.packed.nbytes
        return max(least, draft.cache.sequences_in(room, min(self.drafting.most_live, draft.tokens_per_pass)))


def _finish(draft: Candidate, drafting: SearchSpace, placement: Placement, cached: int) -> Plan:
    blocks, shape, settings = draft.cache.blocks(cached), drafting.shape, drafting.settings
    heads = frozenset(group.head_dim for group in shape.kv_groups)
    needs = AttentionNeeds(heads, draft.packed.gpu, interpreted())
    attention = choose_attention(settings.attention, needs)
    specs = draft.cache.specs
    whole = [count * spec.block for count, spec in zip(blocks, specs, strict=True) if spec.group.window is None]
    return Plan(
        dtype=drafting.dtype,
        quant=draft.packed.quant,
        kv=specs[0].format,
        attention=attention,
        kv_block=specs[0].block,
        kv_blocks=blocks,
        kv_sequences=cached,
        kv_tokens=min(whole, default=shape.context),
        parked_blocks=(0,) * len(blocks),
        tokens_per_pass=draft.tokens_per_pass,
        max_sequences=draft.live,
        deterministic=settings.deterministic,
        placement=placement,
        budget_nbytes=0,
        fixed_nbytes=draft.packed.resident,
        weights_nbytes=draft.packed.nbytes,
        held_nbytes=placement.held_nbytes(draft.packed.shards),
        kv_nbytes=draft.cache.nbytes(cached),
        scratch_nbytes=draft.scratch,
        compute=settings.compute,
        grouped_experts=draft.packed.grouped_experts,
        stores_by_kernel=stores_by_kernel(settings.attention, attention, needs),
        lacks=_lacks(draft.packed, settings),
        notes=dtype_notes(settings.dtype, shape.dtype, draft.packed.gpu),
    )


def _lacks(packed: WeightFootprint, settings: Settings) -> dict[str, str]:
    """Why torch computes what kernels of the device should, by family; what nobody wants of them is no lack."""
    if packed.gpu is None:
        return {}
    unwanted = {"attention", "cache"} if settings.attention == "torch" else set()
    if packed.shape.num_experts == 0:
        unwanted.add("experts")
    return {family: reason for family, reason in packed.gpu.lacks.reasons.items() if family not in unwanted}
