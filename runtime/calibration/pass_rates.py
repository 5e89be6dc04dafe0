"""How fast this machine, or its GPU, does what a pass does: products by format, experts, attention, and what is left.

For the machine's profile; rates are named as predictions look them up (plan/cost_model.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import as_file, files
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
from torch import Tensor

from ...moe.expected_rows import expected_union
from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...offload.machine.profile import ATTENTION, TOGETHER, LoadingRates, Overheads
from ...offload.machine.speeds import Case, best_seconds, measure_rates
from ...offload.memory import trim
from ...quant.formats.format import QUANT_FORMATS, get_format
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu
from ...quant.kv.format import KV_FORMATS
from ...quant.matmul.matmul import Matmul, ParallelMatmul, Workspace, kernel_order, measure_gemv_max_rows
from ...quant.native import library
from ...quant.scratch import scratch_nbytes
from ...quant.tensor import TORCH_DTYPES, PackedTensor, dtype_name, pack, pack_into
from ..attention.protocol import AttentionBackend, AttentionCall
from ..attention.torch_backend import TorchAttention
from ..engine.engine import Engine, Model
from ..engine.sequence import Batch, Sequence
from ..engine.sequence import pack as pack_batch
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from ..kv.spec import KVSpec
from ..loading.engine_loader import LoadedEngine, load_engine
from ..loading.machine_memory import budget_of
from ..loading.prepare import prepare
from ..plan.placement import RING_EXPERTS, Placement, Plan, Workload, largest_expert
from ..plan.planner import choose_dtype, make_plan
from ..plan.presets import layer_share
from ..plan.rates import INTEGERS, WIDE
from ..sampling.params import SequenceSampling
from ..settings.errors import DoesNotFit
from ..settings.settings import MemoryBudget, Settings
from ..shape.model_shape import KVGroup, ModelShape
from ..shape.shards import model_shards
from ..source.model_source import ModelSource, open_source

T = TypeVar("T")

EXPERT_ROWS = (1, 16, 64, 256)
EXPERT_SHAPE = (1024, 2048)
# Enough that every thread has several, and that none is still in a cache when it comes again; of float32, half as many.
NUM_EXPERTS = 32
WIDE_ROWS = (1, 16, 128, 1024)
# Query heads, KV heads, head size; tokens that are looked back to; sequences side by side.
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
LOOKED_AT = 512
SEQUENCES = 16
CHUNK = 256
_SECONDS = 0.05


@torch.inference_mode()
def pass_rates() -> dict[str, dict[int, float]]:
    """FLOP/s on the CPU by operation, then by rows (of an expert, or queries of one sequence)."""
    measures: dict[str, Callable[[], dict[int, float]]] = {}
    measures |= {TOGETHER.format(name): partial(_experts, name, torch.bfloat16) for name in QUANT_FORMATS}
    for name in integer_formats():
        measures[TOGETHER.format(INTEGERS.format(name))] = partial(_experts, name, torch.bfloat16, integer=True)
    measures |= {WIDE: _wide, TOGETHER.format(WIDE): partial(_experts, "none", torch.float32)}
    measures |= {ATTENTION.format(name): partial(_attention, name) for name in KV_FORMATS}
    return {name: _apart(measure) for name, measure in measures.items()}


def _apart(measure: Callable[[], T]) -> T:
    """What `measure` finds. What it took is free before the next takes as much: a job that waits has a budget."""
    found = measure()
    trim()
    return found


def _experts(format_name: str, dtype: torch.dtype, integer: bool = False) -> dict[int, float]:
    count = NUM_EXPERTS if dtype.itemsize == 2 else NUM_EXPERTS // 2
    packed = pack(torch.randn(EXPERT_SHAPE).to(dtype), format_name, kernel_order(format_name, dtype, "cpu"))
    experts = [PackedTensor(packed.layout, tuple(p.clone() for p in packed.planes)) for _ in range(count)]
    compute = _products(packed, integer)
    flop = 2 * count * EXPERT_SHAPE[0] * EXPERT_SHAPE[1]
    rates = {}
    for rows in EXPERT_ROWS:
        x = torch.randn(rows, EXPERT_SHAPE[1]).to(dtype)
        run = partial(compute.parallel_for, experts, partial(_multiply, x))
        rates[rows] = rows * flop / best_seconds(run, _SECONDS)
    return rates


def _products(packed: PackedTensor, integer: bool) -> ParallelMatmul:
    """Products with such matrices by all threads: kernels on codes are divided among these, not among torch's."""
    layout = packed.layout
    nbytes = scratch_nbytes(layout, layout.dtype, deterministic=False)
    helpers = [Workspace(nbytes) for _ in range(torch.get_num_threads() - 1)]
    limits = measure_gemv_max_rows(layout.format, integer)
    return ParallelMatmul(Workspace(nbytes), integer=integer, gemv_max_rows=limits, helpers=helpers)


def _multiply(x: torch.Tensor, expert: PackedTensor, products: Matmul) -> None:
    products.linear(x, expert)


def _wide() -> dict[int, float]:
    """Rates of float32 matmuls: quantized weights are dequantized to float32 if that is the dtype."""
    weights = cycle([torch.randn(EXPERT_SHAPE) for _ in range(8)])
    flop = 2 * EXPERT_SHAPE[0] * EXPERT_SHAPE[1]

    def case(rows: int) -> Callable[[], None]:
        x = torch.randn(rows, EXPERT_SHAPE[1])

        def multiply() -> None:
            torch.mm(x, next(weights).t())

        return multiply

    return measure_rates({WIDE: case}, WIDE_ROWS, flop, _SECONDS)[WIDE]


def _attention(kv_format: str) -> dict[int, float]:
    """One token each of many sequences, and a piece of a prompt."""
    dtype = torch.float32 if kv_format == "fp32" else torch.float16 if kv_format == "fp16" else torch.bfloat16
    return {
        1: _attention_rate(kv_format, dtype, SEQUENCES, 1),
        CHUNK: _attention_rate(kv_format, dtype, 2, CHUNK),
    }


def _attention_rate(kv_format: str, dtype: torch.dtype, num_sequences: int, count: int) -> float:
    cache = attention_cache(kv_format, num_sequences, "cpu")
    attention = TorchAttention(cache, dtype, tiled=False, native=library.available())
    attend = attend_once(cache, attention, dtype, num_sequences, count)
    return attention_flop(num_sequences, count) / best_seconds(attend, _SECONDS)


def attention_flop(num_sequences: int, count: int) -> int:
    """Operations of attention of the last `count` of LOOKED_AT tokens of each sequence."""
    return 4 * num_sequences * sum(range(LOOKED_AT - count + 1, LOOKED_AT + 1)) * HEADS * HEAD_DIM


def attention_cache(kv_format: str, num_sequences: int, device: torch.device | str) -> KVCache:
    """A cache of one layer for `num_sequences` of LOOKED_AT tokens."""
    spec = KVSpec(KVGroup((0,), KV_HEADS, HEAD_DIM, None), kv_format)
    return KVCache([KVPool(spec, num_sequences * spec.blocks_for(LOOKED_AT), device)])


def attend_once(
    cache: KVCache, attention: AttentionBackend, dtype: torch.dtype, num_sequences: int, count: int
) -> Callable[[], object]:
    """Attention of the last `count` of LOOKED_AT tokens of each sequence, as a call, on the device of the cache."""
    device, blocks = cache.pools[0].memory.bytes.device, cache.pools[0].spec.blocks_for(LOOKED_AT)
    chosen = []
    for index in range(num_sequences):
        sequence = Sequence([0] * LOOKED_AT, SequenceSampling(1))
        sequence.table.blocks = [list(range(index * blocks, (index + 1) * blocks))]
        sequence.table.num_tokens = LOOKED_AT - count
        chosen.append((sequence, count))
    batch, rows = pack_batch(chosen), num_sequences * count
    q = torch.randn(rows, HEADS, HEAD_DIM).to(device, dtype)
    k, v = (torch.randn(rows, KV_HEADS, HEAD_DIM).to(device, dtype) for _ in range(2))
    return lambda: attention.attend(AttentionCall(0, HEAD_DIM**-0.5), q, k, v, batch)


# A matrix of an expert, as a checkpoint has it, and one to pack: gate and up together.
LOADED_SHAPE, PACKED_SHAPE = (768, 2048), (1536, 2048)
LOADED_EXPERTS = 8


def faster(first: LoadingRates, second: LoadingRates) -> LoadingRates:
    """The better rate of each: what was slower in one of two moments was disturbed."""
    packed = {name: max(rate, second.pack_bytes_s[name]) for name, rate in first.pack_bytes_s.items()}
    return LoadingRates(max(first.convert_bytes_s, second.convert_bytes_s), packed)


@torch.inference_mode()
def loading_rates() -> LoadingRates:
    """How fast bfloat16 weights are copied out of files into joined matrices, and packed by all threads."""
    packed = {name: _apart(partial(_packing_rate, name)) for name in QUANT_FORMATS}
    files = torch.empty(3 * LOADED_EXPERTS, *LOADED_SHAPE, dtype=torch.bfloat16).normal_()
    return LoadingRates(files.nbytes / best_seconds(partial(_convert, files), _SECONDS), packed)


def _packing_rate(format_name: str) -> float:
    weight = torch.randn(PACKED_SHAPE).bfloat16()
    chosen = get_format(format_name).in_order(kernel_order(format_name, weight.dtype, "cpu"))
    layout = chosen.layout(PACKED_SHAPE, dtype_name(weight.dtype))
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    compute = ParallelMatmul(Workspace(0), helpers=[Workspace(0) for _ in range(torch.get_num_threads() - 1)])
    return weight.nbytes / best_seconds(partial(pack_into, weight, layout, buffer, compute.for_each), _SECONDS)


def _convert(files: Tensor) -> None:
    """Gate, up and down of every expert, read into new matrices, gate and up one below the other."""
    up, down = (files.new_empty(parts * LOADED_EXPERTS, *LOADED_SHAPE) for parts in (2, 1))
    for matrix, read in zip((*up, *down), files, strict=True):
        matrix.copy_(read)


ROWS = (1, 4, 16, 64, 256, 1024)
SHAPE = (1536, 2048)
# Matrices of this many bytes in all take turns, so that each is out of the caches when it is used again, as in a model.
POOL_NBYTES = 192 << 20
_SECONDS_EACH = 0.06


@torch.inference_mode()
def weight_rates() -> dict[str, dict[int, float]]:
    """FLOP/s of bfloat16 rows times matrices of an expert's size, all of torch's threads at work.

    By format of the weights, of `integer_formats` twice, then by rows. A few seconds.
    """
    ways = [(name, name, False) for name in QUANT_FORMATS]
    ways += [(INTEGERS.format(name), name, True) for name in integer_formats()]
    rates: dict[str, dict[int, float]] = {}
    for name, format_name, integer in ways:
        rates |= _apart(partial(_weight_rates, name, format_name, integer))
    return rates


def _weight_rates(name: str, format_name: str, integer: bool) -> dict[str, dict[int, float]]:
    return measure_rates({name: _case(integer, format_name)}, ROWS, 2 * SHAPE[0] * SHAPE[1], _SECONDS_EACH)


def integer_formats() -> tuple[str, ...]:
    """The formats whose products with rows that are rounded to int8 are measured."""
    return ("int8", "int4") if library.available() else ("int8",)


def _case(integer: bool, format_name: str) -> Case:
    matrices = cycle(matrices_of(format_name, torch.bfloat16))
    compute = _products(next(matrices), integer)

    def case(num_rows: int) -> Callable[[], None]:
        x = torch.randn(num_rows, SHAPE[1]).bfloat16()
        y = x.new_empty(num_rows, SHAPE[0])
        return partial(_multiply_by, compute, x, y, matrices)

    return case


def _multiply_by(compute: ParallelMatmul, x: Tensor, y: Tensor, matrices: Iterator[PackedTensor]) -> None:
    compute.linear(x, next(matrices), out=y)


def matrices_of(
    format_name: str, dtype: torch.dtype, device: torch.device | str = "cpu", count: int | None = None
) -> list[PackedTensor]:
    """`count` matrices [SHAPE] with the same numbers, or as many as take POOL_NBYTES."""
    order = kernel_order(format_name, dtype, torch.device(device).type)
    packed = pack(torch.randn(SHAPE).to(dtype), format_name, order)
    count = count or -(-POOL_NBYTES // packed.nbytes)
    return [
        PackedTensor(packed.layout, tuple(plane.to(device, copy=True) for plane in packed.planes)) for _ in range(count)
    ]


# Sequences and prompt tokens of each: enough kinds of passes to tell the four costs apart.
PASS_KINDS = ((1, 16), (8, 16), (48, 16), (64, 64))
PASS_TOKENS = 4096
DECODED = 8
_MEMORY = MemoryBudget(2 << 30)
LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass: its tokens, the sequences in it, whether experts streamed, its seconds, and those before and after the
    model's own. `launches` of a layer are a multiple of those that `Overheads` are for."""

    tokens: int
    sequences: int
    streamed: bool
    seconds: float
    outside_s: float
    launches: float = 1.0


def measure_overheads() -> Overheads:
    """The fixed costs of passes beside matmuls, measured with the bundled small model.

    Its products are as good as nothing, so what is left is Python, torch's dispatch, threads that meet, and elementwise
    work: the same code as in any model. Takes about six seconds on the CPU, and the disk of temporary files.
    """
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        plan = _plan(source.shape, "none")
        timed = list(timed_passes(source, plan, None))
        with TemporaryDirectory(prefix="moedge-overheads-") as folder:
            store = Path(folder, "store")
            prepare(source, store, plan.quant, plan.dtype, plan.budget)
            timed += timed_passes(source, streaming(source.shape, plan), store)
    return solve_overheads(source.shape, timed)


# A format whose products the library of CPU kernels computes in tiles.
_FUSED_QUANT = "nf4"


def measure_fused_overheads() -> Overheads | None:
    """The same where the library of CPU kernels computes whole layers; None where it does not."""
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        plan = _plan(source.shape, _FUSED_QUANT)
        if not plan.fused_nbytes:
            return None
        with closing(load_engine(source, plan)) as loaded:
            return solve_overheads(source.shape, list(passes_of(loaded, source.shape, plan))) if loaded.fused else None


def _plan(shape: ModelShape, quant: str, memory: MemoryBudget = _MEMORY) -> Plan:
    """A plan that holds all weights and takes every kind of pass, kernel by kernel."""
    most = max(count for count, _ in PASS_KINDS)
    settings = Settings(quant=quant, tokens_per_pass=PASS_TOKENS, max_sequences=most)
    return replace(make_plan(shape, settings, memory, Workload(most, 128)), graphs_nbytes=0)


def streaming(shape: ModelShape, plan: Plan) -> Plan:
    """The same with every expert streamed, through a ring so large that nothing waits."""
    shards = model_shards(shape, plan.quant, plan.dtype)
    ring = RING_EXPERTS * largest_expert(shards)
    return replace(plan, placement=Placement(len(shards.layers), (0,) * len(shards.layers), 0, ring))


def timed_passes(source: ModelSource, plan: Plan, store: Path | None, device: Device | None = None) -> Iterator[Timed]:
    with closing(load_engine(source, plan, store, device)) as loaded:
        yield from passes_of(loaded, source.shape, plan, device)


def passes_of(loaded: LoadedEngine, shape: ModelShape, plan: Plan, device: Device | None = None) -> Iterator[Timed]:
    """Every kind of pass, timed the second time that it is run."""
    # Prompts are the same each time: found in the cache, hardly a token of them would be computed.
    loaded.engine.scheduler.cache.sharing = False
    for kind in PASS_KINDS:
        _passes(loaded.engine, shape, *kind, device)
    for kind in PASS_KINDS:
        for tokens, seconds, outside_s in _passes(loaded.engine, shape, *kind, device):
            launches = 1.0 if device is None else layer_share(prompts=tokens > kind[0], by_torch=False)
            yield Timed(tokens, kind[0], plan.streams, seconds, outside_s, launches)


def _passes(
    engine: Engine, shape: ModelShape, count: int, length: int, device: Device | None
) -> list[tuple[int, float, float]]:
    """Tokens, seconds and those outside the model of the first pass, and of the middle one of those that decode."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        prompt = torch.randint(1, shape.vocab, (length,), generator=generator).tolist()
        engine.add(Sequence(prompt, SequenceSampling(DECODED, ignore_eos=True)))
    engine.start_counting()
    timed = []
    model = engine.model = _TimedModel(engine.model, device)
    while engine.busy:
        before, begun = engine.metrics.pass_tokens, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        timed.append((engine.metrics.pass_tokens - before, seconds, seconds - model.seconds))
    engine.model = model.model
    decoding = sorted(timed[1:], key=lambda one: one[1])
    return [timed[0], decoding[len(decoding) // 2]]


class _TimedModel:
    """A model whose last pass took `seconds`, a device's included."""

    def __init__(self, model: Model, device: Device | None) -> None:
        self.model = model
        self.seconds = 0.0
        self._device = device

    def forward(self, batch: Batch) -> Tensor:
        begun = time.perf_counter()
        logits = self.model.forward(batch)
        if self._device is not None:
            self._device.synchronize()
        self.seconds = time.perf_counter() - begun
        return logits


def solve_overheads(shape: ModelShape, timed: list[Timed]) -> Overheads:
    """Least squares of relative errors over layers, experts, sequences and tokens where nothing streams;
    what passes take longer that stream is put down to arrivals, and what is outside the model to sequences."""
    held, streamed = ([one for one in timed if one.streamed == kind] for kind in (False, True))
    causes, seconds = _causes(shape, held), _seconds(held)
    solved = torch.linalg.lstsq(causes / seconds[:, None], torch.ones_like(seconds)[:, None]).solution.flatten()
    # A cost that noise made negative is none.
    solved = solved.clamp(min=LEAST_S)
    layer_s, expert_s, sequence_s, token_s = solved.tolist()
    arrival_s = LEAST_S
    if streamed:
        causes = _causes(shape, streamed)
        longer = (_seconds(streamed) - causes @ solved) / causes[:, 1]
        arrival_s = max(LEAST_S, longer.median().item())
    schedule_s = sum(one.outside_s * one.sequences for one in timed) / sum(one.sequences**2 for one in timed)
    return Overheads(layer_s, expert_s, sequence_s, token_s, arrival_s, max(LEAST_S, schedule_s))


def _causes(shape: ModelShape, timed: list[Timed]) -> torch.Tensor:
    """[passes, 4] of layers, experts that are wanted, sequences and tokens, over all layers."""
    experts = shape.layers[0].experts
    assert experts is not None
    rows = [
        (one.launches, expected_union(experts.count, experts.per_token, one.tokens), one.sequences, one.tokens)
        for one in timed
    ]
    return len(shape.layers) * torch.tensor(rows, dtype=torch.float64)


def _seconds(timed: list[Timed]) -> torch.Tensor:
    """Those of the model."""
    return torch.tensor([one.seconds - one.outside_s for one in timed], dtype=torch.float64)


# Calls that are submitted before the device is waited for: a pass does not wait after every one either.
IN_FLIGHT = 8
# Bytes of keys and values; enough for a kernel to take longer than submitting it.
CACHE_NBYTES = 192 << 20
_DEVICE_SECONDS = 0.03
_MODEL_NBYTES = 1 << 30


@torch.inference_mode()
def device_rates(device: Device, gpu: Gpu) -> dict[str, dict[int, float]]:
    """FLOP/s on a device by operation, then by rows, in the dtype of most models there; some seconds.

    Of the kernels that run there, as `gpu` says, experts are computed in one launch and attention reads a paged cache.
    """
    dtype = TORCH_DTYPES[choose_dtype("auto", "bf16", gpu)]
    rates = {name: {rows: _alone(device, name, dtype, rows) for rows in ROWS} for name in QUANT_FORMATS}
    if not gpu.lacks.experts:
        rates |= {TOGETHER.format(name): _together(device, name, dtype) for name in tuning.FORMATS}
    if not gpu.lacks.attention:
        formats = [name for name in KV_FORMATS if TORCH_DTYPES.get(name, dtype) == dtype]
        rates |= {ATTENTION.format(name): _device_attention(device, gpu, name, dtype) for name in formats}
    device.give_back()
    return rates


def _alone(device: Device, format_name: str, dtype: torch.dtype, num_rows: int) -> float:
    matrices = cycle(matrices_of(format_name, dtype, device.torch_device, IN_FLIGHT))
    nbytes = scratch_nbytes(next(matrices).layout, dtype_name(dtype), deterministic=False)
    compute = ParallelMatmul(Workspace(nbytes, device.torch_device))
    x = torch.randn(num_rows, SHAPE[1]).to(device.torch_device, dtype)
    y = x.new_empty(num_rows, SHAPE[0])
    return 2 * num_rows * SHAPE[0] * SHAPE[1] / _call_seconds(device, lambda: compute.linear(x, next(matrices), out=y))


def _together(device: Device, format_name: str, dtype: torch.dtype) -> dict[int, float]:
    """Rows of each of NUM_EXPERTS matrices, in one launch."""
    # Imports Triton.
    from ...quant.kernels.product import GroupedProduct

    matrices = matrices_of(format_name, dtype, device.torch_device, NUM_EXPERTS)
    product, rates = GroupedProduct(device.torch_device), {}
    for rows in EXPERT_ROWS:
        x = torch.randn(NUM_EXPERTS * rows, SHAPE[1]).to(device.torch_device, dtype)
        spans = [slice(first, first + rows) for first in range(0, len(x), rows)]
        launch = product.launch(x, x.new_empty(len(x), SHAPE[0]), matrices, [], product.rows(spans, x))
        rates[rows] = 2 * len(x) * SHAPE[0] * SHAPE[1] / _call_seconds(device, launch.run)
    return rates


def _device_attention(device: Device, gpu: Gpu, kv_format: str, dtype: torch.dtype) -> dict[int, float]:
    """One token each of many sequences, and pieces of prompts."""
    # Imports Triton.
    from ..attention.triton_backend import TritonAttention

    token_nbytes = KVSpec(KVGroup((0,), KV_HEADS, HEAD_DIM, None), kv_format).token_nbytes
    num_sequences = max(1, int(CACHE_NBYTES / (token_nbytes * LOOKED_AT)))
    cache = attention_cache(kv_format, num_sequences, device.torch_device)
    attention = TritonAttention(cache, dtype, False, gpu, device.torch_device, not gpu.lacks.cache)
    rates = {}
    for count, sequences in ((1, num_sequences), (CHUNK, min(8, num_sequences))):
        attend = attend_once(cache, attention, dtype, sequences, count)
        rates[count] = attention_flop(sequences, count) / _call_seconds(device, attend)
    return rates


def _call_seconds(device: Device, call: Callable[[], object]) -> float:
    """Of one of several calls in flight; the first is not counted, for which Triton compiles."""

    def calls() -> None:
        for _ in range(IN_FLIGHT):
            call()
        device.synchronize()

    return best_seconds(calls, _DEVICE_SECONDS) / IN_FLIGHT


def device_overheads(device: Device, gpu: Gpu) -> Overheads | None:
    """The fixed costs of passes on a device, measured with the bundled small model, all of whose weights are there.

    None where the device has too little memory for it.
    """
    taken = budget_of(device, 0, gpu)
    granted = replace(taken, nbytes=taken.context_nbytes + _MODEL_NBYTES)
    memory = MemoryBudget(taken.process_nbytes + _MODEL_NBYTES, granted)
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        try:
            plan = _plan(source.shape, "none", memory)
            return solve_overheads(source.shape, list(timed_passes(source, plan, None, device)))
        except (DoesNotFit, RuntimeError) as error:
            if isinstance(error, DoesNotFit) or is_out_of_memory(error):
                return None
            raise
