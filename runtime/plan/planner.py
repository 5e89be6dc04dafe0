"""Chooses precision, cache, passes and placement for a request: the plan with the shortest predicted time of all that
the settings leave open, found by branch and bound. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...quant.kernels.gpu import interpreted
from ..attention.choice import AttentionNeeds, choose_attention, stores_by_kernel
from ..settings.budgets import GIB, MIB, DeviceBudget, MemoryBudget
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import resident_nbytes
from .candidate import Candidate, WeightFootprint
from .cost_model import CostModel, Prediction
from .memory_ledger import MemoryLedger
from .placement import Placement, Plan, Workload, stage_for_device
from .search_space import PlanRequest, SearchSpace, dtype_notes

# A less lossy weight format is taken as long as it takes no more than this times as long as the fastest.
WORTH = 1.5
# Sums that are added up in two ways may differ by this factor.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plan that was taken, what is expected of it, and why: seconds of the best plan in every weight format."""

    plan: Plan
    prediction: Prediction
    seconds: Mapping[str, float]
    request: PlanRequest = field(compare=False)

    @property
    def ledger(self) -> MemoryLedger:
        """The planned bytes of every arena."""
        return MemoryLedger.of(self.plan, self.request.shape)


def solve(request: PlanRequest) -> PlanResult:
    """The best plan within the request's budget.

    Raises DoesNotFit, naming the smallest budget that works, and SettingError. Where the job's longest rows do not fit,
    the cache is as large as it can be; `kv_tokens` says which rows fail.
    """
    if request.budget.device is not None and request.settings.compute == "int8":
        raise SettingError("--compute int8 multiplies on the CPU; give --gpu-mem 0 with it")
    search = _Search(SearchSpace(request))
    best: dict[str, tuple[Plan, Prediction]] = {}
    for quant in search.space.quants:
        if found := search.best(quant):
            best[quant] = found
        if quant == search.space.quants[0] and found and search.holds_everything(found[0]):
            # The checkpoint's own precision, and nothing is short of memory.
            break
    if not best:
        # What a device does not hold does not fit the host, or a store the disk.
        raise search.refusal
    seconds = {quant: prediction.seconds for quant, (_, prediction) in best.items()}
    fastest = min(seconds.values())
    taken = next(quant for quant in best if seconds[quant] <= WORTH * fastest)
    return PlanResult(*best[taken], seconds, request)


def make_plan(shape: ModelShape, settings: Settings, budget: MemoryBudget, workload: Workload) -> Plan:
    """The best plan for a machine that nobody measured. Raises as `solve` does."""
    return solve(PlanRequest(costs=CostModel(shape), workload=workload, budget=budget, settings=settings)).plan


def budget_range(
    shape: ModelShape, settings: Settings, workload: Workload, device_budget: DeviceBudget | None = None
) -> tuple[int, int]:
    """The smallest budget of the tier that computes with which every row works, and that which holds all weights."""
    budget = MemoryBudget(0, device_budget)
    space = SearchSpace(PlanRequest(costs=CostModel(shape), workload=workload, budget=budget, settings=settings))
    candidate = space.candidate(space.smallest_quant)
    return candidate.smallest, candidate.smallest_whole


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A candidate that fits, with its cache, the seconds that it takes at least, and its `index` in the search."""

    least_seconds: float
    index: int
    candidate: Candidate
    cached: int


class _Search:
    """Tries every number of tokens and of sequences in a pass; held shards take the bytes that these leave.

    What a candidate takes at least is known before its shards are placed, so the search begins with the most promising
    one, and ends where the next could not be faster than what was found.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._request = space.request
        self._budget = space.request.budget
        self._longest = space.longest()
        self.refusal = DoesNotFit("no plan was found")

    def best(self, quant: str) -> tuple[Plan, Prediction] | None:
        """The fastest plan in a weight format; of plans that are equally fast, that with the smaller passes."""
        best: tuple[float, int, Plan, Prediction] | None = None
        for each in sorted(self._candidates(quant), key=lambda each: (each.least_seconds, each.index)):
            if best and each.least_seconds * (1 - ROUNDING) > best[0]:
                break
            if plan := self._plan(each):
                predicted = self._request.costs.predict(plan, self._request.workload)
                if best is None or (predicted.seconds, each.index) < best[:2]:
                    best = predicted.seconds, each.index, plan, predicted
        return best and best[2:]

    def holds_everything(self, plan: Plan) -> bool:
        """Whether all weights are where they compute, and every sequence that runs has its blocks."""
        return plan.placement.ring_nbytes == 0 and plan.kv_sequences >= plan.max_sequences

    def _candidates(self, quant: str) -> Iterator[_Ranked]:
        costs, settings, index = self._request.costs, self._request.settings, 0
        for tokens in self.space.tokens():
            for live in self.space.sequences(tokens):
                candidate = self._candidate(quant, tokens, live)
                cached = self._cached(candidate)
                blocks = candidate.cache.blocks(cached)
                free = self._budget.computing_nbytes - candidate.fixed - candidate.cache.nbytes_of(blocks)
                if free < candidate.weights.streaming_nbytes:
                    break
                least = costs.least_seconds(candidate, settings.compute, blocks, free, self._request.workload)
                yield _Ranked(least, index, candidate, cached)
                index += 1

    def _has_disk(self, weights: WeightFootprint) -> bool:
        store, granted = weights.nbytes + resident_nbytes(weights.shape, weights.dtype), self._budget.disk_nbytes
        if granted is None or store <= granted:
            return True
        self.refusal = DoesNotFit(
            f"in {weights.quant} this model's weights do not fit the memory, and their store of {store / GIB:.2f} GiB "
            f"does not fit --disk {granted / GIB:.2f} GiB; give --disk {-(-store // MIB)}MiB, or more memory"
        )
        return False

    def _candidate(self, quant: str, tokens: int, live: int) -> Candidate:
        """Fewer bits for keys and values gain nothing where the cache fits without them."""
        space = self.space
        if self._request.settings.kv == "auto":
            native = space.candidate(quant, self._longest, tokens, live, space.dtype)
            if native.whole(min(space.most_live, tokens)) <= self._budget.computing_nbytes:
                return native
        return space.candidate(quant, self._longest, tokens, live)

    def _plan(self, ranked: _Ranked) -> Plan | None:
        """None, and why in `refusal`, where the host cannot take what a device does not hold, or the disk a store."""
        try:
            plan = self._placed(ranked.candidate, ranked.cached)
        except DoesNotFit as refusal:
            self.refusal = refusal
            return None
        return None if plan.streams and not self._has_disk(ranked.candidate.weights) else plan

    def _placed(self, candidate: Candidate, cached: int) -> Plan:
        """Raises DoesNotFit where the host cannot take what a device does not hold."""
        placement = candidate.place(self._budget.computing_nbytes, candidate.cache.nbytes(cached))
        assert placement is not None, "a candidate leaves the least that weights take"
        plan = self._finish(candidate, placement, cached)
        if self._budget.device is None:
            return replace(plan, free_nbytes=self._budget.host_nbytes - plan.used_nbytes)
        weights = candidate.weights
        staging = stage_for_device(weights.shape, weights.shards, placement, self._budget, plan.dtype)
        # Where every sequence has its blocks at its longest, none is preempted.
        waits = plan.kv_sequences < plan.max_sequences and staging.disk_nbytes == 0
        parked = candidate.cache.parked(plan.kv_blocks, staging.free_nbytes if waits else 0)
        free = staging.free_nbytes - candidate.cache.nbytes_of(parked)
        return replace(plan, staging=staging, parked_blocks=parked, free_nbytes=free)

    def _cached(self, candidate: Candidate) -> int:
        """Where all weights are held, blocks take what is left: nothing else could use it."""
        budget = self._budget.computing_nbytes
        least = self.space.cached(candidate.live, candidate.cache.longest)
        if candidate.whole(least) > budget:
            return least
        free = budget - candidate.fixed - candidate.weights.nbytes
        most = min(self.space.most_live, candidate.tokens_per_pass)
        return max(least, candidate.cache.sequences_in(free, most))

    def _finish(self, candidate: Candidate, placement: Placement, cached: int) -> Plan:
        weights, specs, blocks = candidate.weights, candidate.cache.specs, candidate.cache.blocks(cached)
        shape, settings = weights.shape, self._request.settings
        needs = AttentionNeeds(frozenset(group.head_dim for group in shape.kv_groups), weights.gpu, interpreted())
        attention = choose_attention(settings.attention, needs)
        whole = [count * spec.block for count, spec in zip(blocks, specs, strict=True) if spec.group.window is None]
        return Plan(
            dtype=self.space.dtype,
            quant=weights.quant,
            kv=specs[0].format,
            attention=attention,
            compute=settings.compute,
            deterministic=settings.deterministic,
            kv_block=specs[0].block,
            kv_blocks=blocks,
            kv_sequences=cached,
            kv_tokens=min(whole, default=shape.context),
            parked_blocks=(0,) * len(blocks),
            tokens_per_pass=candidate.tokens_per_pass,
            max_sequences=candidate.live,
            placement=placement,
            budget=self._budget,
            process_nbytes=weights.process,
            resident_nbytes=weights.resident,
            weights_nbytes=weights.nbytes,
            held_nbytes=placement.held_nbytes(weights.shards),
            kv_nbytes=candidate.cache.nbytes(cached),
            workspace_nbytes=weights.workspace,
            activations_nbytes=candidate.activations,
            slack_nbytes=candidate.slack,
            grouped_experts=weights.grouped_experts,
            stores_by_kernel=stores_by_kernel(settings.attention, attention, needs),
            lacks=_lacks(weights, settings),
            notes=dtype_notes(settings.dtype, shape.dtype, weights.gpu),
        )


def _lacks(weights: WeightFootprint, settings: Settings) -> dict[str, str]:
    """Why torch computes what kernels of the device should, by family; what nobody asks of them is no lack."""
    if weights.gpu is None:
        return {}
    unwanted = {"attention", "cache"} if settings.attention == "torch" else set()
    if weights.shape.num_experts == 0:
        unwanted.add("experts")
    return {family: reason for family, reason in weights.gpu.lacks.reasons.items() if family not in unwanted}
