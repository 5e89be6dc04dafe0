"""How long passes and jobs take on a machine, and what they wait for. Closed form, torch-free.

A pass costs seconds of every resource; a job is a few kinds of passes. `CostModel` is all that the planner needs of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import mul
from typing import Self

from ...moe.division import MOST_TOKENS, ExpertSeconds
from ...moe.expected_rows import padded_rows, wanted_by
from ...offload.machine.profile import ATTENTION, DRAWING, HEADS, LATENTS, TOGETHER
from ...quant.formats.format import CODE_BITS, get_format
from ...quant.kernels.tuning import GROUPED_ROWS
from ..kv.spec import KVSpec
from ..settings.settings import MemoryBudget
from ..shape.model_shape import ExpertsShape, Matrix, ModelShape
from ..shape.shards import ITEM_NBYTES, ModelShards, model_shards
from .candidate import GRAPH_ROWS, CacheSize, Candidate, WeightFootprint, fuses, may_fuse
from .cpu_attention import CPUAttention
from .cpu_experts import DividedExperts, expert_seconds
from .hosting import Room, live_sequences, needed, passes_with_prompts
from .loading_cost import LoadingCost, Prepared, least_loading_s, loading_cost
from .pass_bytes import HostKVBytes, StreamedWeightBytes
from .placement import DEEP_RING_EXPERTS, Placement, Plan, Workload, largest_expert
from .prediction import RESOURCES, Prediction, Resource
from .presets import CPU_LAYER_S, SHARED_HEADS, beside_layers_s, head_size, host_kv_s, layer_share, small_kernels_s
from .rates import INTEGERS, WIDE, Curve, Rates

# Bytes that a layer moves on a device for each number of the hidden states, beside its products, two for each number
# read or written. Counted for a dense layer with keys of a quarter and an inner width of 3.5 times the hidden one:
# norms with residuals 8, q, k and v with their turning 4.5, attention 2, its output 2, the gated inner vector 7, its
# product 1.
NUMBER_NBYTES = 50
NOTHING_PREPARED = Prepared()
# Tokens of the text by which offsets of quantized keys are measured (runtime/weights/key_offsets.py).
OFFSETS_TOKENS = 256.0
# With a ring of hardly any expert, disk and compute take turns for half of what they could do together. Measured from 3
# experts to 24, extrapolated to none (bench/results/log.md).
MOST_UNHIDDEN = 0.5


@dataclass(frozen=True, slots=True)
class _PassLoad:
    """One pass: `decoding` sequences with a token each, and `prompts` tokens of prompts, `chunk` of one at a time.

    `started` prompts end in it, and get logits too. A mean token of each kind attends to `decoding_back` or
    `prompts_back` earlier tokens.
    """

    decoding: float
    prompts: float
    chunk: float
    started: float
    decoding_back: float
    prompts_back: float

    @property
    def tokens(self) -> float:
        return self.decoding + self.prompts

    @property
    def sequences(self) -> float:
        return self.decoding + self.prompts / max(1.0, self.chunk)

    @property
    def sampled(self) -> float:
        return self.decoding + self.started


@dataclass(frozen=True, slots=True)
class _PassCost:
    """Seconds that a pass keeps each resource busy, which overlap, and the bytes that cross links.

    `host_s` are of the thread that drives a device: on a CPU all is in `compute_s`. `unhidden` is the share of the
    shorter of disk and compute that overlaps with nothing. `cpu_s` are of the cores that compute `cpu_experts` beside a
    device, and attention that it waits for.
    """

    disk_s: float
    link_s: float
    compute_s: float
    host_s: float
    disk_nbytes: float
    link_nbytes: float
    unhidden: float
    cpu_s: float = 0.0
    cpu_experts: float = 0.0


class _LayerKind:
    """`count` layers with the same matrices and experts."""

    def __init__(self, count: int, dense: tuple[Matrix, ...], experts: ExpertsShape | None) -> None:
        self.count = count
        self.dense = dense
        self.experts = experts
        self.dense_numel = sum(matrix.numel * matrix.uses for matrix in dense)
        self.expert_numel = experts.numel if experts else 0
        self.may_fuse = may_fuse(dense, experts)

    @property
    def width(self) -> int:
        """Numbers of one token's queries of all heads: what the projection behind attention takes in."""
        widths = [each.cols for each in self.dense if each.name.rpartition(".")[2] in ("o_proj", "out_proj", "dense")]
        return max(widths, default=max((each.cols for each in self.dense), default=0))


@dataclass(frozen=True, slots=True)
class _Computing:
    """The factors of the speed of passes, except their size, by the names that a plan has for them.

    `fused`: the library of CPU kernels computes those layers as a whole that it may. `graphs`: a device replays layers
    of passes that are not too large.
    """

    dtype: str
    quant: str
    compute: str
    kv: str
    kv_block: int
    grouped_products: bool
    on_device: bool
    fused: bool
    graphs: bool


def _rates_alike(quant: str, formats: _Computing) -> list[str]:
    """The names of rates that products with matrices in a format may have, the first that was measured counts."""
    # Kernels on codes are for bfloat16; others widen, then multiply in their own precision.
    names = [quant if formats.dtype == "bf16" else WIDE]
    # Formats of which nobody measured rates have those of a format that computes about as fast.
    alike = quant
    while alike := get_format(alike).rates:
        names.append(alike)
    if formats.compute == "int8" and formats.dtype == "bf16":
        # All codes of 3 and 4 bits are multiplied by integers in the same way.
        names = [INTEGERS.format(f"int{max(4, CODE_BITS[get_format(quant).codes])}"), *names]
    return names


class _ModelWork:
    """A model packed in one weight format, its layers grouped by kind: usually one or two."""

    def __init__(self, shape: ModelShape, shards: ModelShards) -> None:
        self.shape = shape
        self.shards = shards
        kinds = Counter((layer.dense, layer.experts) for layer in shape.layers)
        self.kinds = [_LayerKind(count, *kind) for kind, count in kinds.items()]
        self.attention_width = sum(kind.count * kind.width for kind in self.kinds) / len(shape.layers)
        self.expanding_numel = max((x.numel for kind in self.kinds for x in kind.dense if x.unpacked), default=0)
        shares = [kind.experts.per_token / kind.experts.count for kind in self.kinds if kind.experts]
        # The least share of the experts of a layer that a token asks for.
        self.rarest = min(shares, default=1.0)


class _PassCosts:
    """Costs of passes under one plan."""

    def __init__(self, model: _ModelWork, plan: Plan, rates: Rates, computing: _ComputeCosts) -> None:
        self._rates = rates
        self._computing = computing
        staging = plan.staging
        self._disk = StreamedWeightBytes(model.shards, plan.placement if staging is None else staging.placement)
        self._link = None if staging is None else StreamedWeightBytes(model.shards, plan.placement)
        self._divided = DividedExperts(model.shards, plan.placement, plan.cpu_experts)
        # On a device it was not measured.
        self._unhidden = _unhidden_share(model.shards, plan.placement) if staging is None else 0.0
        self._host_kv = HostKVBytes(plan.host_kv, plan.kv_blocks, plan.max_sequences, len(model.shape.layers))
        self.specs = tuple(KVSpec(group, plan.kv, plan.kv_block) for group in model.shape.kv_groups)
        here = plan.host_kv is not None and plan.host_kv.rows_nbytes > 0
        self._cpu_attention = CPUAttention(self.specs, rates) if here else None
        self._link_s = self._kv_s = 1 / rates.link_bytes_s
        if staging is not None and rates.pin_nbytes is not None:
            # Keys and values are page-locked before weights are.
            pins = rates.pin_nbytes - (plan.host_kv.host_nbytes if plan.host_kv else 0)
            copied = 1 - min(1.0, pins / max(1, staging.staged_nbytes))
            self._link_s += copied * (1 / rates.staged_bytes_s - self._link_s)

    def cost(self, load: _PassLoad) -> _PassCost:
        disk, link = self._disk.nbytes(load.tokens), self._link.nbytes(load.tokens) if self._link else 0
        compute, host = self._computing.seconds(load)
        by_cpu = self._divided.of(load.tokens)
        link = max(0.0, link - by_cpu.nbytes)
        arrivals = max(0.0, (self._link or self._disk).arrivals(load.tokens) - by_cpu.experts)
        arriving = arrivals * self._rates.overheads.arrival_s + by_cpu.layers * CPU_LAYER_S
        compute, host = (compute, host + arriving) if self._link else (compute + arriving, host)
        cohorts = self._host_kv.cohorts(load.sequences)
        attended_s = 0.0
        if self._cpu_attention is not None:
            hosted = self._host_kv.sequences(load.sequences) / load.sequences * load.decoding
            attended_s = self._cpu_attention.seconds(hosted, load.decoding_back, cohorts)
            # Prompts that begin bring nothing, and one that a pass before left off brings its cohort.
            cohorts = min(cohorts, 1 if load.prompts else 0)
        keys = cohorts * self._host_kv.cohort_nbytes
        disk_s, link_s = disk / self._rates.disk_bytes_s, link * self._link_s + keys * self._kv_s
        driven, computed = host_kv_s(cohorts, self._host_kv.layers)
        # Both the device and the thread that drives it wait for the CPU's attention.
        host_s, compute_s = host + driven + attended_s, compute + computed + attended_s
        by_cores = by_cpu.seconds + attended_s, by_cpu.experts
        return _PassCost(disk_s, link_s, compute_s, host_s, disk, link + keys, self._unhidden, *by_cores)


def _unhidden_share(shards: ModelShards, placement: Placement) -> float:
    """The share that a ring this small keeps from overlapping; 0 where no expert streams."""
    if not placement.expert_ring:
        return 0.0
    return MOST_UNHIDDEN * max(0.0, 1 - placement.expert_ring / largest_expert(shards) / DEEP_RING_EXPERTS)


class _ComputeCosts:
    """Seconds to compute passes, without the transfer of their weights."""

    def __init__(self, model: _ModelWork, formats: _Computing, rates: Rates) -> None:
        self._on_device, self._graphs = formats.on_device, formats.graphs
        self.seconds = cache(self._seconds)
        self._shape = model.shape
        self._overheads = rates.overheads
        self._fused_overheads = (rates.fused_overheads if formats.fused else None) or rates.overheads
        # Experts of one launch cost what a layer costs.
        self._launches_together = formats.grouped_products
        self._memory_bytes_s = rates.memory_bytes_s
        self._kinds = model.kinds
        self._width = model.attention_width
        specs = [KVSpec(group, formats.kv, formats.kv_block) for group in model.shape.kv_groups]
        self._groups = [_GroupReads.of(spec, model.expanding_numel) for spec in specs]
        names, routed = (_rates_alike(each, formats) for each in get_format(formats.quant).parts)
        self._alone = rates.curve(*names)
        self._together = rates.curve(*chain.from_iterable((TOGETHER.format(each), each) for each in routed))
        # Kernels of a device read codes of single matrices, too, for as many rows as pay (quant/matmul/matmul.py).
        by_kernels = (
            self._on_device and formats.grouped_products and formats.quant != "none" and formats.dtype != "fp32"
        )
        self._few_rows = self._together if by_kernels else self._alone
        # On a device torch attends to latents, and to what indexers choose.
        self._by_torch = self._on_device and not all(group.is_plain for group in model.shape.kv_groups)
        self._attending = [
            rates.curve(
                LATENTS if self._by_torch else HEADS.format(formats.kv, head_size(group.head_dim)),
                ATTENTION.format(formats.kv),
                "none",
                *names,
            )
            for group in model.shape.kv_groups
        ]
        self._expanding, self._drawing = rates.curve("none", *names), rates.curve(DRAWING)

    def _seconds(self, load: _PassLoad) -> tuple[float, float]:
        """Seconds of the tier that computes, and of the thread that drives it if that is a device."""
        layers = [(kind.count, self._layer(kind, load), self._fixed(kind, load)) for kind in self._kinds]
        compute = sum(count * products for count, products, _ in layers) + self._attention(load) + self._head(load)
        fixed = sum(count * each for count, _, each in layers) + self._overheads.schedule_s * load.sequences
        if not self._on_device:
            return compute + fixed, 0.0
        drawn = load.sampled * self._shape.vocab / self._drawing.at(load.sampled)
        small = len(self._shape.layers) * small_kernels_s(load.prompts > 0, self._by_torch)
        return compute + drawn + small, fixed + beside_layers_s(load.sampled)

    def _layer(self, kind: _LayerKind, load: _PassLoad) -> float:
        tokens = load.tokens
        seconds = _products(self._dense(tokens), kind.dense_numel, tokens)
        seconds += tokens * self._shape.hidden * NUMBER_NBYTES / self._memory_bytes_s
        if kind.experts is None:
            return seconds
        union = self._union(kind, tokens)
        rows = padded_rows(max(1, round(tokens * kind.experts.per_token / union)))
        return seconds + _products(self._together, union * kind.expert_numel, rows)

    def _fixed(self, kind: _LayerKind, load: _PassLoad) -> float:
        overheads = self._fused_overheads if kind.may_fuse else self._overheads
        graphs = self._graphs and load.tokens <= GRAPH_ROWS
        share = layer_share(load.prompts > 0, self._by_torch, graphs) if self._on_device else 1.0
        seconds = overheads.layer_s * share + overheads.sequence_s * load.sequences
        alone = 0.0 if self._launches_together else overheads.expert_s
        return seconds + overheads.token_s * load.tokens + alone * self._union(kind, load.tokens)

    def _union(self, kind: _LayerKind, tokens: float) -> float:
        """The experts of a layer that tokens want together."""
        experts = kind.experts
        return experts.count * wanted_by(tokens, experts.per_token / experts.count) if experts else 0.0

    def _attention(self, load: _PassLoad) -> float:
        """Seconds of attention over earlier tokens. Keys and values are read once for a chunk."""
        decoding = self._attention_to(load.decoding, 1.0, load.decoding_back)
        return decoding + (self._attention_to(load.prompts, load.chunk, load.prompts_back) if load.prompts else 0.0)

    def _attention_to(self, tokens: float, chunk: float, back: float) -> float:
        seconds, decoding = 0.0, self._on_device and chunk <= 1
        for group, curve in zip(self._groups, self._attending, strict=True):
            rate = curve.at(chunk)
            attended = min(back, group.window or back)
            # Generated tokens use the absorbed form of latent attention, prompts expand what they look back at.
            width = (group.absorbed_width if chunk <= 1 else 0) or self._width
            expanding = 2 * tokens / chunk * attended * group.expanding_numel if chunk > 1 else 0
            # A GPU's kernels decode each element once for all heads that share it: that is what takes them their time.
            flop = tokens * attended * (2 * SHARED_HEADS * group.token_numel if decoding else 4 * width)
            read = tokens / max(1.0, chunk) * attended * group.token_nbytes
            attending = flop / rate + expanding / (self._expanding.at(attended) if self._on_device else rate)
            seconds += group.num_layers * max(attending, read / self._memory_bytes_s)
        return seconds

    def _head(self, load: _PassLoad) -> float:
        head = self._shape.head
        numel = head.numel if head else self._shape.embedding_numel
        return _products(self._dense(load.sampled), numel, load.sampled)

    def _dense(self, rows: float) -> Curve:
        return self._few_rows if rows <= GROUPED_ROWS else self._alone


def _products(rate: Curve, numel: float, rows: float) -> float:
    return 2 * rows * numel / rate.at(rows)


@dataclass(frozen=True, slots=True)
class _GroupReads:
    """Layers with the same window; a token has `token_numel` keys and values in each, of `token_nbytes`; latents are
    expanded by a matrix of `expanding_numel` elements."""

    num_layers: int
    window: int | None
    token_numel: int
    token_nbytes: float
    absorbed_width: float
    expanding_numel: int

    @classmethod
    def of(cls, spec: KVSpec, expanding_numel: int) -> Self:
        group, token_nbytes = spec.group, spec.record_nbytes / spec.block
        numel = group.kv_heads * (group.head_dim + group.value_dim)
        return cls(len(group.layers), group.window, numel, token_nbytes, group.absorbed_width, expanding_numel)


# How many equal passes, and what each of them has.
_Phase = tuple[float, _PassLoad]


def _predict(costs: _PassCosts, plan: Plan, job: Workload, factors: Mapping[str, float]) -> Prediction:
    most = min(plan.max_sequences, plan.tokens_per_pass)
    room = Room(plan.kv_sequences, plan.kv_blocks, 0, plan.host_kv)
    live = live_sequences(costs.specs, room.all_blocks, most, job, plan.tokens_per_pass)
    costed = [(passes, costs.cost(load)) for passes, load in _phases(job, live, plan.tokens_per_pass)]
    timed = [(passes, _busy(cost, factors)) for passes, cost in costed]
    busy: dict[str, float] = {name: sum(passes * each[name] for passes, each in timed) for name in RESOURCES}
    total = sum(passes * _pass_seconds(cost, factors) for passes, cost in costed)
    waits = [(passes, max(RESOURCES, key=each.__getitem__)) for passes, each in timed]
    waited = {name: sum(passes for passes, longest in waits if longest == name) for name in RESOURCES}
    generated, passes = job.mean_generated * job.sequences, sum(passes for passes, _ in costed)
    return Prediction(
        seconds=total,
        prompt_tok_s=job.mean_prompt * job.sequences / total,
        generated_tok_s=generated / total,
        passes=passes,
        sequences=live,
        bottleneck=max(RESOURCES, key=lambda name: (waited[name], busy[name])),
        busy_s=busy,
        disk_nbytes=sum(passes * cost.disk_nbytes for passes, cost in costed),
        link_nbytes=sum(passes * cost.link_nbytes for passes, cost in costed),
        cpu_experts=sum(each * cost.cpu_experts for each, cost in costed) / passes,
    )


def _phases(job: Workload, live: float, tokens_per_pass: int) -> Iterator[_Phase]:
    """A job as rounds of `live` sequences: passes with prompts in them, then passes that only decode.

    The last round may have fewer sequences. While the first one begins, and when at the end none is admitted any more,
    half of the sequences decode in the mean.
    """
    rounds = max(1, int(job.sequences / live))
    rest = job.sequences - rounds * live
    yield from _round(job, live, tokens_per_pass, 1, beginning=True)
    if rounds > 1:
        yield from _round(job, live, tokens_per_pass, rounds - 1)
    if rest >= 1:
        yield from _round(job, rest, tokens_per_pass, 1)
    last = rest if rest >= 1 else live
    ending = min(passes_with_prompts(job, last, tokens_per_pass), job.mean_generated)
    yield ending, _decoding(job, max(1.0, last / 2))


def _round(job: Workload, live: float, tokens_per_pass: int, times: int, beginning: bool = False) -> Iterator[_Phase]:
    filling = passes_with_prompts(job, live, tokens_per_pass)
    decoding = max(0.0, job.mean_generated - filling)
    riding = live * (job.mean_generated - decoding) / filling * (0.5 if beginning else 1.0)
    prompts = live * job.mean_prompt / filling
    chunk, back = min(job.mean_prompt, prompts), job.mean_prompt / 2
    load = _PassLoad(riding, prompts, chunk, live / filling, _mean_context(job), back)
    yield times * filling, load
    if decoding:
        yield times * decoding, _decoding(job, live)


def _decoding(job: Workload, live: float) -> _PassLoad:
    return _PassLoad(live, 0.0, 1.0, 0.0, _mean_context(job), 0.0)


def _mean_context(job: Workload) -> float:
    return job.mean_prompt + job.mean_generated / 2


def _busy(cost: _PassCost, factors: Mapping[str, float]) -> dict[Resource, float]:
    """Seconds of a pass by resource."""
    seconds = cost.disk_s, cost.link_s, cost.compute_s, cost.host_s, cost.cpu_s
    return {name: each * factors.get(name, 1.0) for name, each in zip(RESOURCES, seconds, strict=True)}


def _pass_seconds(cost: _PassCost, factors: Mapping[str, float]) -> float:
    seconds = _busy(cost, factors)
    return max(seconds.values()) + cost.unhidden * min(seconds["disk"], seconds["compute"])


@dataclass(frozen=True, slots=True)
class _Passes:
    """`count` equal passes of `sequences`: seconds that each takes to compute, by the tier that does or by the thread
    that drives it, and the least share of the weights not held that it reads; `few`: the CPU may compute some."""

    count: float
    busy_s: float
    wanted: float
    sequences: float
    few: bool


class CostModel:
    """The cost of passes and jobs of a model on a machine, from its rates.

    `factors` multiply the seconds of resources, in every weight format. Tokens are expected to choose experts
    independently, and every expert is as likely. What no budget changes is kept, so requests that are made from each
    other share one cost model: `expert_seconds` by weight format and dtype, of an expert on the link and on the CPU
    (None where the CPU computes none), every `candidate`, and the room `needed` for its sequences.
    """

    def __init__(
        self, shape: ModelShape, rates: Rates | None = None, factors: Mapping[str, float] | None = None
    ) -> None:
        self.shape = shape
        self.rates = rates or Rates()
        self.factors = factors or {}
        self._weights: dict[tuple[object, ...], WeightFootprint] = {}
        self._work = cache(lambda quant, dtype: _ModelWork(shape, model_shards(shape, quant, dtype)))
        self._computing = cache(lambda each: _ComputeCosts(self._work(each.quant, each.dtype), each, self.rates))
        self._phases = cache(lambda *job: tuple(_phases(*job)))
        self._passes = cache(self._passes_of)
        # Where no weights are read from disk in passes, and where some are.
        self._loading_s = cache(
            lambda weights, prepared: [
                least_loading_s(weights, streams, self.rates.loading, self.rates.disk_bytes_s, Prepared({}, prepared))
                for streams in (False, True)
            ]
        )
        self._specs = cache(lambda kv, block: tuple(KVSpec(group, kv, block) for group in shape.kv_groups))
        self.expert_seconds = cache(lambda quant, dtype: expert_seconds(shape, quant, dtype, self.rates))
        self.candidate = cache(
            lambda weights, kv, block, longest, tokens, live: Candidate(
                weights, CacheSize(self._specs(kv, block), longest, tokens), live
            )
        )
        self.needed = cache(needed)

    def weights(self, quant: str, dtype: str, deterministic: bool, budget: MemoryBudget) -> WeightFootprint:
        """The model in a weight format, on the tier of a budget that computes."""
        device = budget.device
        key = (quant, dtype, deterministic, budget.taken_nbytes, device and (device.context_nbytes, device.gpu))
        if key not in self._weights:
            self._weights[key] = WeightFootprint(self.shape, quant, dtype, deterministic, budget)
        return self._weights[key]

    def query_nbytes(self, dtype: str) -> int:
        """Bytes of a token's queries of all heads, in the layer that has most."""
        return max(kind.width for kind in self._work("none", dtype).kinds) * ITEM_NBYTES[dtype]

    def predict(self, plan: Plan, workload: Workload, prepared: Prepared = NOTHING_PREPARED) -> Prediction:
        """The predicted time of the job under the plan, if `prepared` weights exist already."""
        predicted = _predict(self.pass_costs(plan), plan, workload, self.factors)
        loading = self.loading(plan, workload, prepared)
        return replace(predicted, loading_s=loading.seconds, written_nbytes=loading.written_nbytes)

    def pass_costs(self, plan: Plan) -> _PassCosts:
        """Costs of passes under a plan."""
        formats = plan.dtype, plan.quant, plan.compute, plan.kv, plan.kv_block, plan.grouped_products
        ways = plan.staging is not None, plan.fused_nbytes > 0, plan.graphs_nbytes > 0
        computing = self._computing(_Computing(*formats, *ways))
        return _PassCosts(self._work(plan.quant, plan.dtype), plan, self.rates, computing)

    def decoding_s(self, plan: Plan, workload: Workload) -> Callable[[int], float]:
        """The seconds of a pass, by its generated tokens."""
        costs = self.pass_costs(plan)
        return lambda tokens: _pass_seconds(costs.cost(_decoding(workload, tokens)), self.factors)

    def loading(self, plan: Plan, workload: Workload, prepared: Prepared = NOTHING_PREPARED) -> LoadingCost:
        """What happens before the first row, with the seconds of each step."""
        costs = self.pass_costs(plan)
        live = min(plan.max_sequences, plan.tokens_per_pass, workload.sequences)
        length = max(1.0, min(plan.tokens_per_pass // live, workload.longest - 1))
        passes = (
            _PassLoad(0.0, live * length, length, live, 0.0, length / 2),
            _PassLoad(0.0, OFFSETS_TOKENS, OFFSETS_TOKENS, 0.0, 0.0, OFFSETS_TOKENS / 2),
        )
        rehearsed_s, offsets_s = (_pass_seconds(costs.cost(load), self.factors) for load in passes)
        speeds, disk = self.rates.loading, self.rates.disk_bytes_s
        return loading_cost(self.shape, plan, speeds, disk, prepared, (rehearsed_s, offsets_s))

    def least_seconds(
        self,
        candidate: Candidate,
        compute: str,
        room: Room,
        workload: Workload,
        prepared: Prepared = NOTHING_PREPARED,
        cpu: ExpertSeconds | None = None,
        host_nbytes: int = 0,
    ) -> float:
        """No plan of the candidate is predicted to take less, where its sequences have that room.

        At best all bytes that are left hold weights, `host_nbytes` beside a device among them, and no resource waits
        for another. Of the other weights every pass reads at least the share that it wants of the experts that are
        wanted least, or a CPU computes some of these.
        """
        weights, rates = candidate.weights, self.rates
        disk, link = self.factors.get("disk", 1.0), self.factors.get("link", 1.0)
        missing = max(0, weights.nbytes - room.free_nbytes)
        on_disk = max(0, missing - host_nbytes + (room.host_kv.host_nbytes if room.host_kv else 0))
        read_s = on_disk / rates.disk_bytes_s * disk
        link_s = missing / rates.link_bytes_s * link if weights.on_device else 0.0
        crossing = cpu.read_s / (cpu.link_s + cpu.read_s) if cpu else 1.0
        host_kv = HostKVBytes(room.host_kv, room.blocks, candidate.live, 0)
        attended = room.host_kv is not None and room.host_kv.rows_nbytes > 0
        kv_s = 0.0 if attended else host_kv.cohort_nbytes / rates.link_bytes_s * link
        generating = sum(
            each.count
            * max(
                each.busy_s,
                each.wanted * read_s,
                each.wanted * (crossing if each.few else 1.0) * link_s
                + (host_kv.cohorts(each.sequences) * kv_s if kv_s else 0.0),
            )
            for each in self._passes(candidate, compute, room.all_blocks, workload, missing == 0)
        )
        # Rings and whole experts may leave some of what a host could hold to the disk.
        held_s, streams_s = self._loading_s(weights, prepared.is_model)
        return generating + (streams_s if on_disk else min(held_s, streams_s))

    def _passes_of(
        self, candidate: Candidate, compute: str, blocks: tuple[int, ...], workload: Workload, whole: bool
    ) -> list[_Passes]:
        weights, spec, tokens = candidate.weights, candidate.cache.specs[0], candidate.tokens_per_pass
        live = live_sequences(candidate.cache.specs, blocks, candidate.live, workload, tokens)
        formats = weights.dtype, weights.quant, compute, spec.format, spec.block, weights.grouped_products
        fused = fuses(weights.quant, weights.dtype, weights.deterministic) and not weights.on_device
        costs = self._computing(_Computing(*formats, weights.on_device, fused, whole and weights.graphs > 0))
        factors = self.factors.get("compute", 1.0), self.factors.get("host", 1.0)
        rarest = self._work(weights.quant, weights.dtype).rarest
        return [
            _Passes(passes, busy_s, wanted_by(load.tokens, rarest), load.sequences, load.tokens <= MOST_TOKENS)
            for passes, load in self._phases(workload, live, tokens)
            for busy_s in (max(map(mul, costs.seconds(load), factors)),)
        ]
