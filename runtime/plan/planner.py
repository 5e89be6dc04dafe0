"""Chooses precision, cache, passes and placement for a model, a job and a budget: an exhaustive search over what the
settings leave open, by predicted time. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...quant.kernels.gpu import interpreted
from ..attention.choice import AttentionNeeds, choose_attention
from ..errors import DoesNotFit, SettingError
from ..shape.layouts import resident_nbytes
from ..shape.model_shape import ModelShape
from .device_plan import DeviceRoom, plan_staging
from .draft import Draft, Packed
from .drafting import GIB, MIB, Drafting
from .job import JobShape
from .placement import Placement
from .plan import Plan, Settings
from .predict import Prediction, predict
from .rates import Rates

__all__ = ["Choice", "Plan", "Settings", "Speed", "budget_range", "choose", "make_plan"]

# A less lossy weight format is taken as long as it takes no more than this times as long as the fastest.
WORTH = 1.5


@dataclass(frozen=True, slots=True)
class Speed:
    """What predictions rest on: the machine's rates, and by weight format the factors that earlier runs taught."""

    rates: Rates = field(default_factory=Rates)
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def predict(self, draft: Draft, plan: Plan, job: JobShape) -> Prediction:
        return predict(draft.packed.work, plan, job, self.rates, self.factors.get(plan.quant, {}))


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that was taken, what is expected of it, and what the best plan in every weight format would take."""

    plan: Plan
    prediction: Prediction
    seconds: Mapping[str, float]


def make_plan(
    shape: ModelShape, settings: Settings, host_budget: int, job: JobShape, device: DeviceRoom | None = None
) -> Plan:
    """The plan within `host_budget` bytes, and a device's, where there is one, for a machine that nobody measured."""
    return choose(shape, settings, host_budget, job, device, Speed()).plan


def choose(
    shape: ModelShape,
    settings: Settings,
    host_budget: int,
    job: JobShape,
    device: DeviceRoom | None = None,
    speed: Speed | None = None,
    disk: int | None = None,
) -> Choice:
    """The best plan within `host_budget` bytes, and a device's, where there is one.

    `disk` bytes bound a store of weights that stream from there; None is as much as it takes.

    Raises DoesNotFit, naming the smallest budget that works. Where the job's longest rows do not fit, the cache is as
    large as it can be; `kv_tokens` says which rows fail.
    """
    if device is not None and settings.compute == "int8":
        raise SettingError("--compute int8 multiplies on the processor; give --gpu-mem 0 with it")
    search = _Search(Drafting(shape, settings, job, device), host_budget, speed or Speed(), disk)
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
    shape: ModelShape, settings: Settings, job: JobShape, device: DeviceRoom | None = None
) -> tuple[int, int]:
    """The smallest budget of the tier that computes with which every row works, and that which holds all weights."""
    drafting = Drafting(shape, settings, job, device)
    draft = drafting.draft(drafting.smallest_quant)
    return draft.smallest, draft.smallest_whole


class _Search:
    """Tries every number of tokens and of sequences in a pass; held shards take what these leave."""

    def __init__(self, drafting: Drafting, host_budget: int, speed: Speed, disk: int | None) -> None:
        self.drafting = drafting
        self._disk = disk
        self._host_budget = host_budget
        self._speed = speed
        self._budget = host_budget if drafting.device is None else drafting.device.budget_nbytes
        self._longest = drafting.longest(self._budget)
        self.refusal = DoesNotFit("no plan was found")

    def best(self, quant: str) -> tuple[Plan, Prediction] | None:
        """The fastest plan in a weight format; of plans that are equally fast, that with the smaller passes."""
        tried = [(plan, self._speed.predict(draft, plan, self.drafting.job)) for draft, plan in self._plans(quant)]
        return min(tried, key=lambda one: one[1].seconds, default=None)

    def holds_everything(self, plan: Plan) -> bool:
        """Whether all weights are where they compute, and every sequence that runs has its blocks."""
        held = plan.placement.dense_ring + plan.placement.expert_ring == 0
        return held and plan.kv_sequences >= plan.max_sequences

    def _plans(self, quant: str) -> Iterator[tuple[Draft, Plan]]:
        for tokens in self.drafting.tokens():
            for live in self.drafting.lives(tokens):
                draft = self._draft(quant, tokens, live)
                try:
                    plan = self._plan(draft)
                except DoesNotFit as refusal:
                    self.refusal = refusal
                    return
                if plan is None:
                    break
                if plan.streams and not self._has_disk(draft.packed):
                    continue
                yield draft, plan

    def _has_disk(self, packed: Packed) -> bool:
        store = packed.nbytes + resident_nbytes(packed.shape, packed.dtype)
        if self._disk is None or store <= self._disk:
            return True
        self.refusal = DoesNotFit(
            f"in {packed.quant} this model's weights do not fit the memory, and their store of {store / GIB:.2f} GiB "
            f"does not fit --disk {self._disk / GIB:.2f} GiB; give --disk {-(-store // MIB)}MiB, or more memory"
        )
        return False

    def _draft(self, quant: str, tokens: int, live: int) -> Draft:
        """Nothing is gained by fewer bits of keys and values where all have room without them."""
        drafting = self.drafting
        if drafting.settings.kv == "auto":
            native = drafting.draft(quant, self._longest, tokens, live, drafting.dtype)
            if native.whole(min(drafting.most_live, tokens)) <= self._budget:
                return native
        return drafting.draft(quant, self._longest, tokens, live)

    def _plan(self, draft: Draft) -> Plan | None:
        """None where the draft does not fit. Raises DoesNotFit where the host has no room for a device's rest."""
        cached = self._cached(draft)
        placement = draft.place(self._budget, draft.cache.nbytes(cached))
        if placement is None:
            return None
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

    def _cached(self, draft: Draft) -> int:
        """Where all weights have room, blocks take what is left: nothing else could use it."""
        least = self.drafting.cached(draft.live, draft.cache.longest)
        if draft.whole(least) > self._budget:
            return least
        room = self._budget - draft.fixed - draft.packed.nbytes
        return max(least, draft.cache.sequences_in(room, min(self.drafting.most_live, draft.tokens_per_pass)))


def _finish(draft: Draft, drafting: Drafting, placement: Placement, cached: int) -> Plan:
    blocks, shape, settings = draft.cache.blocks(cached), drafting.shape, drafting.settings
    heads = frozenset(group.head_dim for group in shape.kv_groups)
    specs = draft.cache.specs
    whole = [count * spec.block for count, spec in zip(blocks, specs, strict=True) if spec.group.window is None]
    return Plan(
        dtype=drafting.dtype,
        quant=draft.packed.quant,
        kv=specs[0].format,
        attention=choose_attention(settings.attention, AttentionNeeds(heads, draft.packed.gpu, interpreted())),
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
    )
