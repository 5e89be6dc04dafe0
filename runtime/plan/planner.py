"""The plan request, the search space that the settings leave open, and the search for the best plan. Torch-free.

Precision, cache, passes and placement are chosen together: of all that the settings leave open, the plan with the
shortest predicted time is found by branch and bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ...moe.division import ExpertSeconds
from ...offload.budget import GIB
from ...offload.machine.hardware import Hardware
from ...offload.machine.profile import Machine
from ...quant.formats.format import QUANT_FORMATS, get_format
from ...quant.kernels.gpu import Gpu, interpreted
from ...quant.native import library
from ..attention.choice import AttentionNeeds, choose_attention, stores_by_kernel
from ..kv.spec import SCAN_CHUNK
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import MIB, DeviceBudget, MemoryBudget, Settings, encoder_nbytes
from ..shape.model_shape import ModelShape
from ..shape.shards import SMALLEST_FORMATS, open_formats, tables_nbytes, token_rows_nbytes
from .candidate import Candidate, WeightFootprint, choose_block, fused_nbytes, fuses, largest
from .cost_model import NOTHING_PREPARED, CostModel
from .cpu_attention import may_attend
from .cpu_experts import host_nbytes
from .hosting import Room, rooms
from .kernels import missing_kernels
from .loading_cost import GENERATING, LOADING, Prepared
from .memory_ledger import MemoryLedger
from .notes import WORTH, plan_notes
from .placement import Placement, Plan, Workload, beside_device_nbytes, choose_placement, device_ring, stage_for_device
from .prediction import Prediction
from .speculation import OFF, free_tokens

# What `auto` takes for the cache where memory is short: no measurable loss, half the bytes (docs/quality.md).
SMALL_KV = "int8"
# But not where the cache takes no more of the budget than this: layers that store keys as they are are computed in one
# call each, which saves a pass of one sequence a fifth of its time (bench/results/streaming.md).
LITTLE_KV = 0.02
# Tokens of a pass that are tried; fewer make passes that memory allows where it is shortest, more pay nowhere.
LEAST_TOKENS, MOST_TOKENS = 64, 8192
# More sequences than this are not tried: these take the host 0.15 s a pass (presets.SEQUENCE_S).
MOST_SEQUENCES = 4096
# A plan that streams weights must be faster by this much than one that holds them all, and so must one that streams
# keys and values: predictions are not better (a recorded job within a tenth, bench/results/gpu.md), and what streams
# waits for a link or disk that others use too.
WORTH_STREAMING = 1.05
# And multiplies without rounding activations up to this one: rounding changes answers, and raises perplexity by up to
# 0.6 % (docs/quality.md).
WORTH_ROUNDING = 1.1
# The workload that takes least.
_ONE_TOKEN = Workload(1, 1, 1, 0, 1)
# Sums that are added up in two ways may differ by this factor.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """The request: a model on a machine (`costs`), a workload, a memory budget, and settings.

    `hardware` is the machine's, None where it is not known; `profile` is what was measured of it. `prepared` is what is
    on disk of the model. `corrections` of earlier runs (plan_file.py) change what is predicted, not what is chosen.
    `elsewhere` says that the machine is not this one, and `preset` names the GPU whose rates are a data sheet's.
    Requests that are made from each other share `costs`.
    """

    costs: CostModel
    workload: Workload
    budget: MemoryBudget
    settings: Settings = field(default_factory=Settings)
    hardware: Hardware | None = None
    profile: Machine | None = None
    prepared: Prepared = NOTHING_PREPARED
    corrections: Mapping[str, float] = field(default_factory=dict)
    elsewhere: bool = False
    preset: str = ""

    @property
    def shape(self) -> ModelShape:
        return self.costs.shape

    @property
    def budget_nbytes(self) -> int:
        """The budget of the tier that computes: the device if there is one, else the host."""
        return self.budget.host_nbytes if self.budget.device is None else self.budget.device.nbytes

    def with_budget(self, tier: str, nbytes: int) -> PlanRequest:
        """The same with another budget of "host" or "device" memory."""
        return replace(self, budget=self.budget.with_tier(tier, nbytes))

    def with_settings(self, **changes: object) -> PlanRequest:
        return replace(self, settings=replace(self.settings, **changes))  # type: ignore[arg-type]


class SearchSpace:
    """Makes the candidates of one request, in the formats and limits that its settings leave open.

    Raises SettingError for settings that contradict each other or make no sense.
    """

    def __init__(self, request: PlanRequest) -> None:
        shape, settings, workload = request.shape, request.settings, request.workload
        for name, value in (("tokens-per-pass", settings.tokens_per_pass), ("max-sequences", settings.max_sequences)):
            if value is not None and value < 1:
                raise SettingError(f"--{name} must be at least 1, not {value}")
        self.request = request
        if shape.state_groups and settings.deterministic and (settings.tokens_per_pass or SCAN_CHUNK) < SCAN_CHUNK:
            raise SettingError(
                f"--deterministic cuts prompts of a model with recurrent layers every {SCAN_CHUNK} tokens; "
                f"--tokens-per-pass {settings.tokens_per_pass} is too few, give at least {SCAN_CHUNK}"
            )
        device = request.budget.device
        self.dtype = choose_dtype(settings.dtype, shape.dtype, None if device is None else device.gpu)
        self.quants = _quants(settings, shape, self.dtype)
        self.most_live = min(settings.max_sequences or MOST_SEQUENCES, workload.sequences)
        self._block = choose_block(workload.mean_live)

    def arithmetics(self, quant: str) -> tuple[str, ...]:
        """What the settings leave open of how weights in a format are multiplied, the least lossy first."""
        settings = self.request.settings
        if settings.compute != "auto":
            return (settings.compute,)
        may = self.request.budget.device is None and not settings.deterministic
        return ("float", "int8") if may and _has_integer_kernel(quant, self.dtype) else ("float",)

    def weights(self, quant: str) -> WeightFootprint:
        """The model's weights in a format."""
        return self.request.costs.weights(quant, self.dtype, self.request.settings.deterministic, self.request.budget)

    def candidate(
        self, quant: str, longest: int | None = None, tokens: int = 0, live: int = 1, kv: str = ""
    ) -> Candidate:
        """A candidate; by default for the longest rows of the job, one at a time in the smallest passes."""
        settings = self.request.settings
        longest = max(1, self.request.workload.longest if longest is None else longest)
        kv = kv or (SMALL_KV if settings.kv == "auto" else settings.kv)
        tokens = tokens or self.tokens()[0]
        return self.request.costs.candidate(self.weights(quant), kv, self._block, longest, tokens, live)

    def tokens(self) -> list[int]:
        """Tokens per pass to try: what the user says, else powers of two up to what the job can fill."""
        if self.request.settings.tokens_per_pass is not None:
            return [self.request.settings.tokens_per_pass]
        useful = self.most_live * (1 + self.request.workload.mean_prompt)
        sizes = [LEAST_TOKENS]
        while sizes[-1] < min(useful, MOST_TOKENS):
            sizes.append(2 * sizes[-1])
        return sizes

    def sequences(self, tokens: int) -> Iterator[int]:
        """Numbers of live sequences to try: steps of a thirtieth to a sixteenth, and those that make equal rounds."""
        most = min(self.most_live, tokens)
        steps = {step << power for power in range(9) for step in range(1, 32)}
        equal = {-(-self.request.workload.sequences // rounds) for rounds in range(1, 9)}
        yield from sorted({live for live in steps | equal | {most} if live <= most})

    def longest(self) -> int:
        """The longest sequence that fits in the smallest format: the job's, where it fits. Raises DoesNotFit."""
        quant, least, budget = self.smallest_quant, self.request.workload.least, self.request.budget_nbytes
        if (candidate := self.candidate(quant, least)).smallest > budget:
            raise self._does_not_fit(candidate, budget)
        more = largest(
            self.request.workload.longest - least + 1,
            lambda more: self.candidate(quant, least - 1 + more).smallest <= budget,
        )
        return least - 1 + more

    @property
    def smallest_quant(self) -> str:
        """The weight format of the smallest candidate."""
        return min(self.quants, key=lambda quant: (self.weights(quant).streaming_nbytes, self.weights(quant).nbytes))

    @property
    def smallest(self) -> int:
        """The least budget of the tier that computes in which every row of the job fits."""
        return self.candidate(self.smallest_quant).smallest

    @property
    def for_every_row(self) -> str:
        """That budget as a command line option."""
        return self._option(self.smallest)

    def _does_not_fit(self, candidate: Candidate, budget: int) -> DoesNotFit:
        on_device = self.request.budget.device is not None
        tier, cpu = ("device", "; --gpu-mem 0 computes on the CPU") if on_device else ("host", "")
        smaller = "Shorter prompts or a smaller --tokens-per-pass need"
        if candidate.weights.quant not in SMALLEST_FORMATS:
            smaller = "Shorter prompts, a smaller --tokens-per-pass or --quant nf4 need"
        return DoesNotFit(
            f"{budget / MIB:,.0f} MiB of {tier} memory is too little for this model and job with --quant "
            f"{candidate.weights.quant}: the smallest that works is {self._option(candidate.smallest)} "
            f"({candidate.fixed / MIB:,.0f} MiB for the process and the scratch of a pass)"
            f"{self._beyond(candidate)}. {smaller} less{cpu}."
        )

    def _option(self, nbytes: int) -> str:
        return f"{'--ram' if self.request.budget.device is None else '--gpu-mem'} {-(-nbytes // MIB)}MiB"

    def _beyond(self, shortest: Candidate) -> str:
        """Names the budget for all rows if `shortest`, the candidate for the shortest rows, takes less."""
        # Compared as they are printed, in whole MiB.
        if self.for_every_row == self._option(shortest.smallest):
            return ""
        return f"; that runs only the shortest rows, {self.for_every_row} runs all"


def refuse_too_small(request: PlanRequest) -> None:
    """Raises DoesNotFit where the budget is too small for any job of this model, whatever the workload; SettingError.

    Takes no search, and no tokens need to be counted for it. The message has the least that works for a row of one
    token, and for a row of the whole context.
    """
    space = SearchSpace(replace(request, workload=_ONE_TOKEN))
    smallest = space.candidate(space.smallest_quant)
    if smallest.smallest > request.budget_nbytes:
        context = request.shape.context
        every = SearchSpace(replace(request, workload=Workload(1, context, context, context - 1, 1)))
        tier = "host" if request.budget.device is None else "device"
        raise DoesNotFit(
            f"{request.budget_nbytes / MIB:,.0f} MiB of {tier} memory is too little for this model and any job with "
            f"--quant {smallest.weights.quant}: the smallest that works is {space.for_every_row} "
            f"({smallest.fixed / MIB:,.0f} MiB for the process and the scratch of a pass), for rows of one token; "
            f"{every.for_every_row} runs rows up to the context of {context:,}. `moedge plan` names the smallest for "
            "given rows."
        )


def choose_dtype(wanted: str, checkpoint: str, gpu: Gpu | None) -> str:
    """The dtype to compute in. `auto` is the checkpoint's, but float16 for bfloat16 on a GPU that is slow at it."""
    if wanted != "auto":
        return wanted
    return "fp16" if checkpoint == "bf16" and gpu is not None and not gpu.computes_bf16 else checkpoint


def _quants(settings: Settings, shape: ModelShape, dtype: str) -> tuple[str, ...]:
    """The weight formats that the settings leave open, from exact to smallest."""
    open_ones = open_formats(shape, settings.quant)
    if settings.compute != "int8":
        return open_ones
    found = tuple(quant for quant in open_ones if reads_integers(quant, dtype))
    if not found:
        of_library = ", ".join(name for name in QUANT_FORMATS if get_format(name).reads_integers and name != "int8")
        raise SettingError(
            f"compute int8 multiplies int8 weights, and in bf16 with the library of CPU kernels those in"
            f" {of_library} or of a checkpoint with such codes; found were --quant {settings.quant}, {dtype}"
            f"{'' if library.available() else ' and no such library'}. Give --quant int8, or leave compute away"
        )
    return found


def reads_integers(quant: str, dtype: str) -> bool:
    """Whether weights in this format are multiplied by activations that are rounded to int8."""
    return get_format(quant).whole_rows or _has_integer_kernel(quant, dtype)


def _has_integer_kernel(quant: str, dtype: str) -> bool:
    """Whether the library of CPU kernels does that, with a scale for each 32 activations."""
    return get_format(quant).reads_integers and dtype == "bf16" and library.available()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The plan that was taken, what is expected of it, and why: seconds of the best plan in every weight format, with
    loading as if no weights were prepared. `correction` of earlier runs is in all of them."""

    plan: Plan
    prediction: Prediction
    seconds: Mapping[str, float]
    request: PlanRequest = field(compare=False)
    correction: float = 1.0

    @classmethod
    def of(cls, plan: Plan, seconds: Mapping[str, float], request: PlanRequest) -> PlanResult:
        """The result with this plan. All formats get the same correction, or they could not be compared."""
        predicted = request.costs.predict(plan, request.workload, request.prepared)
        factor = request.corrections.get(GENERATING, 1.0)
        corrected = predicted.corrected(factor, request.corrections.get(LOADING, 1.0))
        return cls(plan, corrected, {quant: factor * each for quant, each in seconds.items()}, request, factor)

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
        raise SettingError("compute int8 multiplies on the CPU; give --gpu-mem 0 with it")
    search = _Search(SearchSpace(request))
    best: dict[str, tuple[Plan, Prediction, _Ranked]] = {}
    for quant in search.space.quants:
        ways = [way for compute in search.space.arithmetics(quant) if (way := search.best(quant, compute))]
        found = None
        if ways:
            fastest = min(prediction.total_s for _, prediction, _ in ways)
            found = best[quant] = next(way for way in ways if way[1].total_s <= WORTH_ROUNDING * fastest)
        whole = found and found[0].placement.ring_nbytes == 0 and found[0].kv_sequences >= found[0].max_sequences
        if quant == search.space.quants[0] and whole:
            # The checkpoint's own precision, all of it held, and every running sequence has its blocks.
            break
    if not best:
        # What a device does not hold does not fit the host, or a store the disk.
        raise search.refusal
    seconds = {quant: prediction.total_s for quant, (_, prediction, _) in best.items()}
    fastest = min(seconds.values())
    taken = next(quant for quant in best if seconds[quant] <= WORTH * fastest)
    plan, _, ranked = best[taken]
    return PlanResult.of(search.speculating(plan, ranked), seconds, request)


def make_plan(shape: ModelShape, settings: Settings, budget: MemoryBudget, workload: Workload) -> Plan:
    """The best plan for a machine without a profile. Raises as `solve` does."""
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
    """A candidate that fits and its arithmetic, with the room of its sequences, the seconds that it takes at least, and
    its `index` in the search. With all rooms before it, index (n, 0), these are the seconds in any of them."""

    least_seconds: float
    index: tuple[int, int]
    candidate: Candidate
    compute: str
    room: Room


class _Search:
    """Tries every number of tokens and of sequences in a pass; held shards take the bytes that these leave.

    What a candidate takes at least is known before its sequences have their room, and its shards their places. So the
    search begins with the most promising one, and ends where the next could not be faster than what was found.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._request = space.request
        self._budget = space.request.budget
        self._longest = space.longest()
        # Not what earlier jobs left: the same request chooses the same.
        self._prepared = space.request.prepared.for_choice
        self.refusal = DoesNotFit("no plan was found")
        costs, settings, device = space.request.costs, space.request.settings, self._budget.device
        self._cpu_experts = self._cpu_may(settings.cpu_experts)
        attends = self._cpu_may(settings.cpu_attention) and may_attend(costs.shape, costs.rates)
        # Bytes of the host that weights may have; those that keys and values may, all page-locked, and of these a
        # token's queries where the CPU may attend to cohorts.
        self._staged_nbytes, self._hosted = 0, (0, 0)
        if device is not None:
            host, queries = self._budget.host_nbytes, costs.query_nbytes(space.dtype) if attends else 0
            self._staged_nbytes = host - beside_device_nbytes(
                costs.shape, space.dtype, device, encoder_nbytes(self._longest)
            )
            pins = host if costs.rates.pin_nbytes is None else costs.rates.pin_nbytes
            self._hosted = min(settings.host_kv_nbytes(host), pins), queries

    def best(self, quant: str, compute: str) -> tuple[Plan, Prediction, _Ranked] | None:
        """The fastest plan in a weight format and arithmetic, but for WORTH_STREAMING; of equally fast ones, that with
        the smaller passes."""
        best: tuple[float, tuple[int, int], Plan, Prediction, _Ranked] | None = None
        waiting = [(each.least_seconds, each.index, each) for each in self._candidates(quant, compute)]
        heapify(waiting)
        while waiting and waiting[0][0] * (1 - ROUNDING) <= (best[0] if best else sys.float_info.max):
            each = heappop(waiting)[2]
            if each.index[1] == 0:
                for ranked in self._in_rooms(each):
                    heappush(waiting, (ranked.least_seconds, ranked.index, ranked))
            elif plan := self._plan(each):
                plan, predicted = self._beside_cpu(plan)
                streams = bool(plan.placement.ring_nbytes) + (plan.host_kv is not None)
                judged = predicted.total_s * WORTH_STREAMING**streams
                if best is None or (judged, each.index) < best[:2]:
                    best = judged, each.index, plan, predicted, each
        return best and best[2:]

    def speculating(self, plan: Plan, ranked: _Ranked) -> Plan:
        """The plan with the tokens that passes may draft at no cost."""
        request = self._request
        if request.settings.speculate == "off":
            return replace(plan, undrafted=OFF)
        free, undrafted = free_tokens(plan, ranked.candidate, request.costs.decoding_s(plan, request.workload))
        return replace(plan, free_tokens=free, undrafted=undrafted)

    def _beside_cpu(self, plan: Plan) -> tuple[Plan, Prediction]:
        """The plan, with experts that the CPU computes where that is faster by WORTH_STREAMING, and its prediction."""
        costs, workload = self._request.costs, self._request.workload
        predicted, seconds = costs.predict(plan, workload, self._prepared), self._expert_seconds(plan)
        if seconds is None or plan.streams or plan.placement.expert_ring == 0:
            return plan, predicted
        nbytes = host_nbytes(costs.shape, plan.dtype)
        if (free := plan.free_nbytes - nbytes) < 0:
            return plan, predicted
        divided = replace(plan, cpu_experts=seconds, cpu_experts_nbytes=nbytes, free_nbytes=free)
        faster = costs.predict(divided, workload, self._prepared)
        return (divided, faster) if faster.total_s * WORTH_STREAMING <= predicted.total_s else (plan, predicted)

    def _cpu_may(self, setting: str) -> bool:
        """Whether the CPU may compute beside a device, by a setting of the user's."""
        may = self._budget.device is not None and not self._request.settings.deterministic and setting != "off"
        return may and (self._request.elsewhere or library.available())

    def _expert_seconds(self, formats: Plan | WeightFootprint) -> ExpertSeconds | None:
        """None where the CPU may compute no experts beside a device."""
        return self._request.costs.expert_seconds(formats.quant, formats.dtype) if self._cpu_experts else None

    def _candidates(self, quant: str, compute: str) -> Iterator[_Ranked]:
        """Those for which there is room, with the seconds that they take in any."""
        index, budget = 0, self._request.budget_nbytes
        for tokens in self.space.tokens():
            for live in self.space.sequences(tokens):
                candidate = self._candidate(quant, tokens, live)
                room, all_run = self._needed(candidate)
                fits = room.free_nbytes >= candidate.weights.streaming_nbytes
                if not fits and next(rooms(candidate, room.cached, budget, *self._hosted), None) is None:
                    break
                # At best, weights have all memory; more blocks change nothing where all sequences run in these.
                room = Room(room.cached, room.blocks, budget - candidate.fixed)
                least = self._least_seconds(candidate, compute, room) if all_run else 0.0
                yield _Ranked(least, (index, 0), candidate, compute, room)
                index += 1

    def _in_rooms(self, ranked: _Ranked) -> Iterator[_Ranked]:
        candidate, cached = ranked.candidate, ranked.room.cached
        for number, room in enumerate(rooms(candidate, cached, self._request.budget_nbytes, *self._hosted), start=1):
            streams = (room.free_nbytes < candidate.weights.whole_nbytes) + (room.host_kv is not None)
            least = self._least_seconds(candidate, ranked.compute, room) * WORTH_STREAMING**streams
            yield replace(ranked, least_seconds=least, index=(ranked.index[0], number), room=room)

    def _least_seconds(self, candidate: Candidate, compute: str, room: Room) -> float:
        """Infinite, and why in `refusal`, where the disk has no room for what surely streams from it."""
        on_disk = candidate.weights.whole_nbytes - room.free_nbytes - self._staged_nbytes
        if on_disk + (room.host_kv.host_nbytes if room.host_kv else 0) > 0 and not self._has_disk(candidate.weights):
            return math.inf
        beside = self._prepared, self._expert_seconds(candidate.weights), self._staged_nbytes
        return self._request.costs.least_seconds(candidate, compute, room, self._request.workload, *beside)

    def _has_disk(self, weights: WeightFootprint) -> bool:
        store, granted = weights.copied_nbytes, self._budget.disk_nbytes
        there = self._request.prepared.nbytes.get(weights.quant, 0)
        if granted is None or not store or store <= granted + there:
            return True
        self.refusal = DoesNotFit(
            f"in {weights.quant} this model's weights do not fit the memory, and prepared weights of "
            f"{store / GIB:.2f} GiB do not fit the {max(0, granted + there) / GIB:.2f} GiB that --disk and the free "
            f"space allow; give --disk {-(-store // MIB)}MiB, a --disk-dir with more free space, or more memory"
        )
        return False

    def _candidate(self, quant: str, tokens: int, live: int) -> Candidate:
        """Fewer bits for keys and values gain nothing where the cache fits without them, or is small."""
        space, settings, budget = self.space, self._request.settings, self._request.budget_nbytes
        if settings.kv == "auto":
            native = space.candidate(quant, self._longest, tokens, live, space.dtype)
            is_small = native.cache.nbytes(live) <= LITTLE_KV * budget
            if (native.smallest if is_small else native.whole(min(space.most_live, tokens))) <= budget:
                return native
        return space.candidate(quant, self._longest, tokens, live)

    def _plan(self, ranked: _Ranked) -> Plan | None:
        """None, and why in `refusal`, where the host cannot take what a device does not hold, or the disk a store."""
        try:
            plan = self._with_placement(ranked)
        except DoesNotFit as refusal:
            self.refusal = refusal
            return None
        return None if plan.streams and not self._has_disk(ranked.candidate.weights) else plan

    def _with_placement(self, ranked: _Ranked) -> Plan:
        """Raises DoesNotFit where the host cannot take what a device does not hold."""
        plan, candidate = self._in_computing_tier(ranked), ranked.candidate
        if self._budget.device is None:
            plan = plan.with_spare(self._budget.host_nbytes - plan.used_nbytes)
            if plan.streams:
                return plan
            may = fuses(plan.quant, plan.dtype, plan.deterministic)
            most = fused_nbytes(candidate.weights.shape, plan.tokens_per_pass) if may else 0
            fused = min(most, plan.free_nbytes // 2)
            return replace(plan, fused_nbytes=fused, free_nbytes=plan.free_nbytes - fused)
        weights = candidate.weights
        staging = stage_for_device(weights.shape, weights.shards, plan)
        # Where every sequence has its blocks at its longest, none is preempted.
        waits = plan.kv_sequences < plan.max_sequences and staging.disk_nbytes == 0 and plan.host_kv is None
        # A state is not parked, so the sequence is computed again whatever became of its blocks.
        free = staging.free_nbytes if waits and not weights.shape.state_groups else 0
        parked = candidate.cache.parked(plan.kv_blocks, free)
        free = staging.free_nbytes - candidate.cache.nbytes_of(parked)
        left = self._request.budget_nbytes - plan.used_nbytes if plan.attention == "triton" else 0
        graphs = weights.graphs_within(left) if plan.held_nbytes == plan.weights_nbytes else 0
        return replace(plan, staging=staging, parked_blocks=parked, free_nbytes=free, graphs_nbytes=graphs)

    def _needed(self, candidate: Candidate) -> tuple[Room, bool]:
        """The room of sequences that are all in the tier that computes, and whether all live ones run together in it.

        If all weights are held, the cache takes the remaining bytes, because nothing else could use them.
        """
        request, weights = self._request, candidate.weights
        room, all_run = request.costs.needed(candidate, request.workload)
        left = request.budget_nbytes + room.free_nbytes
        if (spare := left - weights.whole_nbytes) < 0:
            return Room(room.cached, room.blocks, left), all_run
        whole = candidate.fixed + weights.whole_nbytes + weights.graphs_within(spare)
        most = min(self.space.most_live, candidate.tokens_per_pass)
        cached = max(room.cached, candidate.cache.sequences_in(request.budget_nbytes - whole, most))
        return Room(cached, candidate.cache.blocks(cached), left), all_run

    def _placement(self, candidate: Candidate, free_nbytes: int, ring: int) -> tuple[Placement, int]:
        """What is held in `free_nbytes`, and the buffers of layers whose experts stream: these save more than the few
        experts whose memory they take."""
        weights, shards, shape = candidate.weights, candidate.weights.shards, candidate.weights.shape
        free_nbytes = min(free_nbytes, weights.nbytes - (free_nbytes < weights.whole_nbytes))
        placement = choose_placement(shards, free_nbytes, ring)
        assert placement is not None, "a candidate leaves the fewest bytes that weights need"
        if not placement.ring_nbytes or not shape.num_experts or weights.on_device or shape.state_groups:
            return placement, 0
        most = fused_nbytes(shape, candidate.tokens_per_pass, experts_stream=True)
        if not fuses(weights.quant, weights.dtype, weights.deterministic) or not most:
            return placement, 0
        less = choose_placement(shards, free_nbytes - most, ring)
        return (less, most) if less and less.held_dense == len(shards.layers) else (placement, 0)

    def _in_computing_tier(self, ranked: _Ranked) -> Plan:
        """The plan, as far as it concerns the tier that computes."""
        candidate, room = ranked.candidate, ranked.room
        free, shards = self._request.budget_nbytes - candidate.fixed, candidate.weights.shards
        ring = device_ring(shards, free) if candidate.weights.on_device else 0
        placement, fused = self._placement(candidate, room.free_nbytes, ring)
        weights, specs, blocks = candidate.weights, candidate.cache.specs, room.blocks
        shape, settings = weights.shape, self._request.settings
        latent, indexed = (any(getattr(each, kind) for each in shape.kv_groups) for kind in ("is_latent", "is_index"))
        heads = frozenset(group.head_dim for group in shape.kv_groups)
        # Deterministic prompts would take the kernels, too, a few rows at a time: not timed against torch yet.
        lack = "--deterministic takes torch's attention" if settings.deterministic else library.lack()
        needs = AttentionNeeds(heads, weights.gpu, interpreted(), latent, indexed, lack)
        attention = choose_attention(settings.attention, needs)
        reads_embedding = placement.ring_nbytes and weights.shards.head and not weights.on_device
        whole = [count * spec.block for count, spec in zip(blocks, specs, strict=True) if spec.group.window is None]
        return Plan(
            dtype=self.space.dtype,
            quant=weights.quant,
            kv=specs[0].format,
            attention=attention,
            compute=ranked.compute,
            deterministic=settings.deterministic,
            kv_block=specs[0].block,
            kv_blocks=blocks,
            kv_sequences=room.cached,
            kv_tokens=min(whole, default=shape.context),
            parked_blocks=(0,) * len(blocks),
            tokens_per_pass=candidate.tokens_per_pass,
            max_sequences=candidate.live,
            placement=placement,
            budget=self._budget,
            process_nbytes=weights.process,
            resident_nbytes=weights.resident + (0 if placement.ring_nbytes else weights.looked_up),
            weights_nbytes=weights.nbytes,
            held_nbytes=placement.held_nbytes(weights.shards),
            kv_nbytes=candidate.cache.nbytes_of(blocks),
            host_kv=room.host_kv,
            workspace_nbytes=weights.workspace,
            activations_nbytes=candidate.activations,
            slack_nbytes=candidate.slack,
            states_nbytes=candidate.states,
            fused_nbytes=fused,
            encoder_nbytes=encoder_nbytes(candidate.cache.longest),
            prompt_cut=SCAN_CHUNK if shape.state_groups and settings.deterministic else 1,
            tables_nbytes=tables_nbytes(shape),
            token_rows_nbytes=token_rows_nbytes(shape, self.space.dtype if reads_embedding else None),
            grouped_products=weights.grouped_products,
            stores_by_kernel=stores_by_kernel(settings.attention, attention, needs),
            draws_by_kernel=weights.gpu is not None and not weights.gpu.lacks.sampling,
            lacks=missing_kernels(weights, settings),
            notes=plan_notes(weights, settings, candidate.live),
        )
