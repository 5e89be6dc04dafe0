"""Loads an engine that is ready for its first pass from a model source and a plan, with fallbacks when memory runs out.

The loader records in the plan's `MemoryLedger` what it allocates. On a GPU it launches the kernels of experts in every
variant that a job can need: Triton compiles one when it is first launched, which takes from a third of a second to more
than one and is better done before the first row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...moe.expert import ExpertWeights, ResidentExpert, group_by_expert
from ...moe.streaming_mode import Mode
from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...offload.machine.hardware import num_workers
from ...offload.memory import KEPT_NBYTES, keep_memory, return_memory
from ...offload.store.store import Store
from ...offload.stream.rows import RowCounts
from ...offload.stream.stream import DENSE
from ...quant.kernels.gpu import INTERPRETER, Gpu
from ...quant.kernels.tuning import TILE_ROWS
from ...quant.kernels.upload import open_ring
from ...quant.kv.format import KVFormat
from ...quant.matmul.matmul import ParallelMatmul, Workspace, kernel_order, measure_gemv_max_rows
from ...quant.tensor import TORCH_DTYPES
from ..attention.blocks import BlockAttention
from ..attention.cohorts import CohortAttention
from ..attention.latent import LatentAttention
from ..attention.protocol import AttentionBackend, StoreFunction, store_by_torch
from ..attention.torch_backend import TorchAttention
from ..engine.engine import Engine, cause_of
from ..engine.predictor import Predictor
from ..engine.scheduler import PassLimits, Scheduler
from ..kv.allocator import root_hash
from ..kv.cache import KVCache, ParkingMemory
from ..kv.host import CohortCache, CohortMemory, HostKV
from ..kv.pool import KVPool
from ..kv.spec import KVSpec, StateSpec, state_format
from ..kv.states import StatePool
from ..model.definition import LayerAssembly, define, install_head
from ..model.experts_seam import PackedExperts
from ..model.fused.decoder import FusedExecutor
from ..model.fused.layer import FusedLayer, buffers_nbytes
from ..model.fused.selftest import fuse, fused_executor
from ..model.graphs import LayerGraphs
from ..model.recurrent.pass_states import PassStates
from ..model.recurrent.seam import adapt_recurrences
from ..model.runner import ModelRunner
from ..model.weights_seam import (
    PIECE_NUMEL,
    SMALL_PIECE_NUMEL,
    ArrivingLayers,
    fuse_norms,
    move_resident,
    norm_in_pieces,
)
from ..plan.candidate import CPU_SAMPLER_NBYTES, GRAPH_ROWS, GRAPH_SIZES, SAMPLER_NBYTES
from ..plan.fallback import FallbackPolicy
from ..plan.kernels import FUSED_DECODER, FUSED_LAYERS, GRAPHS, SEAMS, Kernels, product_kernels
from ..plan.memory_ledger import (
    CPU_EXPERTS,
    FUSED,
    HOST_KV,
    KV_CACHE,
    PARKED,
    RINGS,
    STAGED,
    STATES,
    WEIGHTS,
    WINDOWS,
    WORKSPACE,
    MemoryLedger,
)
from ..plan.placement import LOADING_NBYTES, Plan
from ..plan.planner import PlanResult
from ..sampling.sampler import DrawRows, Sampler
from ..settings.stages import stage
from ..shape.checkpoint_shape import open_checkpoint, read_tensors
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, ShardLayout, helper_nbytes, model_shards, workspace_nbytes
from ..source.model_source import ModelSource
from ..source.stored_model import read_resident, read_tables, row_readers
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import KeyOffsets, fixed_token_ids, kept, measure
from ..weights.memory import WeightMemory
from ..weights.preparation import WINDOW_COPIES, WINDOW_NBYTES, MemorySink, Preparation, widening_nbytes
from ..weights.streaming import StreamedWeights, fill_from_store


@torch.inference_mode()
def warm_up_products(
    layers: Sequence[LayerAssembly],
    head: ShardLayout | None,
    compute: ParallelMatmul,
    dtype: torch.dtype,
    device: Device,
) -> None:
    """Launches the kernels of products with every tile size, once for each kind of matrix and of layer.

    Experts' weights are zeros in memory that is free now. If it is too little, the first passes compile the kernels.
    """
    if compute.grouped is None:
        return
    dense = [layer.shards.dense for layer in layers] + ([head] if head else [])
    for layout in dict.fromkeys(matrix.layout for shard in dense for matrix in shard.matrices):
        if compute.by_grouped(layout, dtype):
            for launch in compute.grouped.warm_up_launches(layout, dtype):
                launch.run()
    warmed = set()
    for layer in layers:
        shard = layer.shards.expert
        if shard is None:
            continue
        packed: PackedExperts = layer.experts.packed
        kind = (tuple(matrix.layout for matrix in shard.matrices), packed.body.gate, layer.experts.has_bias)
        if kind in warmed:
            continue
        warmed.add(kind)
        try:
            _compute_one(layer, packed, compute, dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    device.give_back()


def _compute_one(layer: LayerAssembly, packed: PackedExperts, compute: ParallelMatmul, dtype: torch.dtype) -> None:
    shard = layer.shards.expert
    assert shard is not None
    torch_device = compute.device
    weights = bind_zeros(layer, shard.nbytes, torch_device)
    for num_rows in TILE_ROWS:
        hidden = torch.zeros(num_rows, weights.up.shape[1], dtype=dtype, device=torch_device)
        groups = group_by_expert(torch.zeros(num_rows, 1, dtype=torch.long, device=torch_device), 1)
        rows = torch.empty(groups.num_rows, hidden.shape[1], dtype=dtype, device=torch_device)
        packed.body.forward_together(hidden, rows, groups, [ResidentExpert(0, weights)], compute)


def bind_zeros(layer: LayerAssembly, nbytes: int, torch_device: torch.device) -> ExpertWeights:
    """An expert of the layer with new weights that are zero."""
    return layer.bind_expert(0, torch.zeros(nbytes, dtype=torch.uint8, device=torch_device))


def make_compute(shape: ModelShape, plan: Plan, torch_device: torch.device) -> ParallelMatmul:
    """The products that the plan names, with their scratch and threads."""
    sizes = (shape, plan.quant, plan.dtype, plan.deterministic)
    # Threads share tiles of products, experts and strips. A device is one queue of work, which more threads would not
    # fill faster.
    helpers = num_workers() - 1 if torch_device.type == "cpu" else 0
    grouped = None
    if plan.grouped_products:
        from ...quant.kernels.product import GroupedProduct

        grouped = GroupedProduct(torch_device, plan.deterministic)
    return ParallelMatmul(
        Workspace(workspace_nbytes(*sizes), torch_device),
        deterministic=plan.deterministic,
        integer=plan.compute == "int8",
        gemv_max_rows=measure_gemv_max_rows(plan.quant, plan.compute == "int8"),
        helpers=[Workspace(helper_nbytes(*sizes)) for _ in range(min(helpers, torch.get_num_threads() - 1))],
        grouped=grouped,
    )


def make_attention(cache: KVCache, plan: Plan, device: Device | None, mtp: bool = False) -> AttentionBackend:
    """The attention backend that the plan names; without a device Triton's kernels run in its interpreter. `mtp`: the
    last layer is a head."""
    if isinstance(cache, CohortCache):
        here = _attention_here(cache.host_kv, plan) if plan.host_kv and plan.host_kv.rows_nbytes else None
        return CohortAttention(cache, cache.host_kv, lambda one: _attention_over(one, plan, device), here, mtp)
    return _attention_over(cache, plan, device)


def _attention_over(cache: KVCache, plan: Plan, device: Device | None) -> AttentionBackend:
    torch_device = device.torch_device if device else torch.device("cpu")
    dtype, tiled = TORCH_DTYPES[plan.dtype], plan.deterministic
    native = plan.attention == "native"
    if any(pool.spec.group.is_latent for pool in cache.pools):
        return LatentAttention(cache, dtype, tiled, torch_device, native)
    if cache.indexers:
        return BlockAttention(cache, dtype, tiled, torch_device, native)
    if native or (plan.attention == "torch" and not plan.stores_by_kernel):
        return TorchAttention(cache, dtype, tiled, torch_device, native=native)
    # Imports Triton, which takes a second and which some machines do not have.
    from ..attention.triton_backend import TritonAttention, store_by_kernel

    if plan.attention == "torch":
        return TorchAttention(cache, dtype, tiled, torch_device, store_by_kernel)
    gpu = Gpu(device.capability, device.processors) if device else INTERPRETER
    return TritonAttention(cache, dtype, tiled, gpu, torch_device, plan.stores_by_kernel)


def _attention_here(host_kv: HostKV, plan: Plan) -> AttentionBackend:
    """The CPU's attention over cohorts, in which `HostKV` stores what is new."""
    cache = KVCache(host_kv.here, sharing=False)
    return TorchAttention(cache, TORCH_DTYPES[plan.dtype], False, store=_stored_before, native=True)


def _stored_before(pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A `StoreFunction` where keys and values are in their slots already."""


def _store_function(plan: Plan) -> StoreFunction:
    """What writes keys and values into blocks on the device."""
    if plan.stores_by_kernel:
        from ..attention.triton_backend import store_by_kernel

        return store_by_kernel
    return store_by_torch


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with its model, its weights and the device that computes, which is None on a CPU.

    `ledger` has the bytes that were planned and allocated for every arena, `loss` what weights of a quantized
    checkpoint lost that were packed again, by group.
    """

    engine: Engine
    model: ModelRunner
    shards: ModelShards
    streamed: StreamedWeights
    parking: ParkingMemory
    ledger: MemoryLedger
    host_kv: HostKV | None = None
    device: Device | None = None
    key_offsets: KeyOffsets | None = None
    loss: Mapping[str, float] = field(default_factory=dict)
    fused: Sequence[FusedLayer] = ()

    def kernels(self, plan: Plan) -> Kernels:
        """What computes, as it was chosen when this was loaded by `plan`."""
        whole = isinstance(self.model.executor, FusedExecutor)
        replays = self.model.seams.graphs is not None and not self.model.seams.graphs.lack
        executor = FUSED_DECODER if whole else FUSED_LAYERS if self.fused else GRAPHS if replays else SEAMS
        return Kernels(executor, plan.attention, product_kernels(plan, self.shards))

    def start_counting(self) -> None:
        """Resets the counters of passes and of streamed bytes, so that they count what comes now."""
        self.engine.start_counting()
        self.streamed.start_counting()
        if self.host_kv is not None:
            self.host_kv.start_counting()
        for reader in row_readers(self.model.model):
            reader.counts = RowCounts()

    @property
    def rows(self) -> RowCounts:
        """The rows of embeddings and tables on the disk, since counting began."""
        return RowCounts.of(reader.counts for reader in row_readers(self.model.model))

    def close(self) -> None:
        """Frees what was allocated."""
        self.engine.close()
        for reader in row_readers(self.model.model):
            reader.close()
        self.streamed.close()
        self.parking.close()
        if self.host_kv is not None:
            self.host_kv.close()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that is ready for jobs, and all that belongs to it: whoever loaded it closes it.

    `chosen` is the plan that it was loaded by, with the workload that was planned for; `policy` is what memory made of
    that plan. `nbytes_written` went to disk as prepared weights meanwhile. No other work may be on the engine while a
    job runs.
    """

    source: ModelSource
    tokenizer: Tokenizer
    chosen: PlanResult
    policy: FallbackPolicy
    engine: LoadedEngine
    nbytes_written: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer, that it has memory for."""
        return min(self.policy.plan.kv_tokens, self.chosen.request.workload.longest)


class Loading:
    """An engine that is being loaded: a model without weights, and memory for them where the plan wants it.

    `device` is the one that the plan was made for.
    """

    def __init__(
        self, source: ModelSource, plan: Plan, device: Device | None = None, layout: str | None = None
    ) -> None:
        """`layout` is the order of codes in the store that is read; without one they lie as kernels here read them."""
        self.source = source
        self.plan = plan
        self.torch_device = device.torch_device if device else torch.device("cpu")
        layout = layout or kernel_order(plan.quant, TORCH_DTYPES[plan.dtype], self.torch_device.type)
        self.shards = model_shards(source.shape, plan.quant, plan.dtype, layout)
        if device is not None:
            # Before anything else is page-locked: every plan uses it thousands of times.
            device.pins.taken += open_ring(device.torch_device)
        self.compute = make_compute(source.shape, plan, self.torch_device)
        self.config = source.config
        self.model = define(self.config, TORCH_DTYPES[plan.dtype])
        self.states = adapt_recurrences(self.model, self.config)
        staging = None if plan.staging is None else plan.staging.placement
        self.memory = WeightMemory(self.shards, plan.placement, staging, device)

    def install_layers(self) -> list[LayerAssembly]:
        """Installs packed modules without bytes in all layers."""
        pairs = zip(self.model.get_decoder().layers, self.shards.layers, strict=True)
        layers = [LayerAssembly(layer, shards, self.compute) for layer, shards in pairs]
        for layer in layers:
            layer.install()
        return layers

    def finish(
        self,
        layers: list[LayerAssembly],
        store: Store | None = None,
        stream: Mode | None = None,
        key_offsets: KeyOffsets | None = None,
    ) -> LoadedEngine:
        """Builds the engine, after `memory` and the small parameters are filled; the rest streams from `store`."""
        self.memory.seal()
        device = self.memory.device
        if device is not None:
            move_resident(self.model, device.torch_device)
        with ExitStack() as opened:
            cohorts = self._cohorts(opened)
            streamed = StreamedWeights(self.memory, self.plan, layers, store, stream)
            opened.callback(streamed.close)
            tied = self.source.shape.head is None
            install_head(self.model, self.shards.head, streamed.head_shard, self.compute, tied)
            if self.compute.deterministic:
                # Routers are transformers' own: with tiles a row's scores do not depend on the number of rows.
                for layer in layers:
                    layer.tile_routers()
            if self.torch_device.type == "cpu":
                norm_in_pieces(self.model, PIECE_NUMEL if _keeps_memory(self.plan) else SMALL_PIECE_NUMEL)
            else:
                fuse_norms(self.model)
            decoder = self.model.get_decoder()
            mtp = self.source.shape.mtp
            decoder.layers = ArrivingLayers(decoder.layers, streamed.arrivals, mtp, streamed.leave_last)
            packed = ModelRunner(self.model, self.compute, self.states, mtp)
            pool = _state_pool(self.source.shape, self.plan, self.torch_device, self.states)
            folder = None if store is None else store.folder
            offsets = _key_offsets(packed, self.source, self.plan, folder, key_offsets)
            specs = [KVSpec(group, self.plan.kv, self.plan.kv_block) for group in self.source.shape.kv_groups]
            parking = ParkingMemory(specs, self.plan.parked_blocks, device)
            opened.callback(parking.close)
            cache = self._cache(specs, offsets, parking, pool, cohorts)
            packed.attention = make_attention(cache, self.plan, device, mtp)
            if device is not None:
                warm_up_products(layers, self.shards.head, self.compute, TORCH_DTYPES[self.plan.dtype], device)
            if self.plan.graphs_nbytes:
                packed.seams.graphs = LayerGraphs(packed.layers, self.torch_device, GRAPH_ROWS, GRAPH_SIZES)
            fused = self._fuse(packed, cache)
            free = (lambda: None) if device is None else device.give_back
            # On a device few large tiles: each starts as many kernels. The plan has the bytes in any case.
            if device is None:
                sampler = Sampler(CPU_SAMPLER_NBYTES, compute=self.compute)
            else:
                sampler = Sampler(SAMPLER_NBYTES, self._draw_rows())
            scheduler = Scheduler(_limits(self.plan), cache)
            engine = Engine(packed, scheduler, sampler, free, self._predictor(packed, scheduler))
            opened.pop_all()
        ledger = self._ledger(streamed, cache, parking, fused)
        host_kv = cache.host_kv if isinstance(cache, CohortCache) else None
        return LoadedEngine(
            engine, packed, self.shards, streamed, parking, ledger, host_kv, device, offsets, fused=fused
        )

    def _cache(
        self,
        specs: list[KVSpec],
        offsets: KeyOffsets | None,
        parking: ParkingMemory,
        states: StatePool | None,
        cohorts: CohortMemory | None,
    ) -> KVCache:
        plan = self.plan
        pools = [
            KVPool(
                spec,
                count,
                self.torch_device,
                None if offsets is None or spec.group.is_index else offsets.of(spec.group),
                plan.deterministic,
            )
            for spec, count in zip(specs, plan.kv_blocks, strict=True)
        ]
        # One cache serves one model: keys and values depend on tokens and on these settings alone.
        formats = (plan.dtype, plan.quant, plan.kv, plan.kv_block, plan.compute)
        root = root_hash((self.source.shape, *formats, plan.deterministic, offsets and offsets.digest))
        device = self.memory.device
        if cohorts is not None and plan.host_kv is not None and device is not None:
            host_kv = HostKV(pools, plan.host_kv, cohorts, device, _store_function(plan))
            return CohortCache(pools, host_kv, plan.host_kv.count, root=root, states=states)
        parked = parking.slots if any(plan.parked_blocks) else None
        return KVCache(pools, root=root, host_slots=parked, states=states)

    def _predictor(self, model: ModelRunner, scheduler: Scheduler) -> Predictor | None:
        """None without a head, and where nothing is drafted, so that none is read."""
        if model.mtp is not None and self.plan.free_tokens:
            return Predictor(model.mtp, scheduler, len(model.layers))
        if model.mtp is not None:
            model.mtp.leave()
        return None

    def _draw_rows(self) -> DrawRows | None:
        if not self.plan.draws_by_kernel:
            return None
        from ..sampling.kernel import draw

        return draw

    def _fuse(self, model: ModelRunner, cache: KVCache) -> list[FusedLayer]:
        """The layers that the library's steps compute, where all weights but experts are held and memory is free for
        buffers."""
        dense_streams = any(key.expert == DENSE for key in self.memory.streamed)
        if dense_streams or not all(pool.spec.group.is_plain for pool in cache.pools):
            return []
        vocab, compute, plan = self.source.shape.vocab, self.compute, self.plan
        found = model.layers
        fused = fuse(model, found, vocab, compute, plan.fused_nbytes, plan.tokens_per_pass)
        model.use(fused_executor(model, fused, len(found), vocab, compute, cache))
        return fused

    def _cohorts(self, opened: ExitStack) -> CohortMemory | None:
        """Allocated before weights are staged, which can do without being page-locked."""
        if self.plan.host_kv is None or self.memory.device is None:
            return None
        cohorts = CohortMemory(self.plan.host_kv, self.memory.device)
        opened.callback(cohorts.close)
        return cohorts

    def _ledger(
        self, streamed: StreamedWeights, cache: KVCache, parking: ParkingMemory, fused: Sequence[FusedLayer]
    ) -> MemoryLedger:
        """The bytes that were planned, and those that were allocated for every arena."""
        device = self.memory.device
        ledger = MemoryLedger.of(self.plan, self.source.shape, None if device is None else lambda: device.peak)
        computing = ledger.computing.tier
        ledger.record(computing, WORKSPACE, self.compute.nbytes)
        ledger.record(computing, WEIGHTS, self.memory.held_nbytes)
        ledger.record(computing, RINGS, streamed.ring_nbytes)
        ledger.record(computing, KV_CACHE, sum(pool.nbytes for pool in cache.pools))
        if cache.states is not None:
            ledger.record(computing, STATES, cache.states.nbytes)
        if self.plan.fused_nbytes:
            ledger.record(computing, FUSED, buffers_nbytes(fused))
        if isinstance(cache, CohortCache):
            ledger.record(computing, WINDOWS, cache.host_kv.device_nbytes)
            ledger.record("host", HOST_KV, cache.host_kv.host_nbytes)
        if self.plan.staging is not None:
            # The host memory that serves a device.
            ledger.record("host", STAGED, self.memory.slab.nbytes)
            if self.plan.cpu_experts is not None:
                ledger.record("host", CPU_EXPERTS, streamed.experts.host_nbytes)
            ledger.record("host", PARKED, sum(slot.numel() for group in parking.slots for slot in group))
        return ledger


def load_engine(
    source: ModelSource,
    plan: Plan,
    store: Path | None = None,
    device: Device | None = None,
    stream: Mode | None = None,
    key_offsets: KeyOffsets | None = None,
) -> LoadedEngine:
    """Loads the engine of a plan: weights from `store` if one is given, else all from the source's checkpoint.

    `key_offsets` are subtracted from quantized keys; if none are given, a CPU uses those of the store, or they are
    measured now.
    """
    keep_memory() if _keeps_memory(plan) else return_memory()
    if store is None:
        loading = Loading(source, plan, device)
        preparation = _read_checkpoint(loading)
        loaded = loading.finish(preparation.layers, None, stream, key_offsets)
        return replace(loaded, loss=preparation.loss.by_group)
    opened = Store.open(store)
    loading = Loading(source, plan, device, str(opened.manifest.recipe["layout"]))
    layers = loading.install_layers()
    tied, streams = loading.shards.head is None, bool(loading.memory.streamed)
    read_resident(opened, loading.model, tied=tied, rows_from_disk=streams and device is None)
    with stage("reading weights", loading.memory.nbytes_kept) as advance:
        fill_from_store(loading.memory, opened, advance)
    return replace(loading.finish(layers, opened, stream, key_offsets), loss=opened.manifest.extra.get("loss", {}))


def _key_offsets(
    model: ModelRunner, source: ModelSource, plan: Plan, store: Path | None, given: KeyOffsets | None
) -> KeyOffsets | None:
    """The key offsets to use; None where keys are not quantized.

    A store has those of a CPU. A device measures its own: with others, tokens would show whether weights are streamed.
    """
    if not KVFormat.parse(plan.kv).keys.quantized:
        return None
    offsets = given or (None if store is None or plan.staging is not None else kept(store, source.shape))
    return offsets or measure(model, fixed_token_ids(source.folder))


def _state_pool(
    shape: ModelShape, plan: Plan, torch_device: torch.device, states: PassStates | None
) -> StatePool | None:
    """The states of recurrent layers, which `states` of the passes get as their pool; None where the model has none."""
    if states is None:
        return None
    spec = StateSpec(shape.state_groups, plan.dtype, state_format(plan.kv, plan.deterministic))
    slots = plan.states_nbytes // spec.nbytes
    states.pool = StatePool(spec, slots, torch_device, most_running=plan.max_sequences, cut=plan.prompt_cut)
    states.tiled = plan.deterministic
    return states.pool


def _read_checkpoint(loading: Loading) -> Preparation:
    plan = loading.plan
    # The memory of passes is not in use yet; a plan for a device has bytes for loading.
    free = plan.kv_nbytes + plan.scratch_nbytes if plan.staging is None else LOADING_NBYTES
    with open_checkpoint(loading.config, loading.source.weights) as checkpoint:
        window = min((free - widening_nbytes(loading.source.shape)) // (WINDOW_COPIES + 1), WINDOW_NBYTES)
        tensors = read_tensors(loading.config, checkpoint)
        preparation = Preparation(loading.model, checkpoint, loading.compute, window, tensors)
        doing = "loading weights" if plan.quant == "none" else f"quantizing weights to {plan.quant}"
        with stage(doing, loading.shards.nbytes) as advance:
            preparation.run(loading.shards, MemorySink(loading.memory), advance, head_first=True)
        read_tables(loading.model, checkpoint)
    return preparation


def _limits(plan: Plan) -> PassLimits:
    return PassLimits(plan.tokens_per_pass, plan.max_sequences, plan.prompt_cut, plan.free_tokens)


def _keeps_memory(plan: Plan) -> bool:
    """Whether enough bytes are free for the heap to keep the buffers of a pass for the next one."""
    return plan.kept_nbytes > 0 or (plan.staging is not None and plan.free_nbytes >= KEPT_NBYTES)


def load_with_fallback(load: Callable[[Plan], LoadedEngine], policy: FallbackPolicy) -> LoadedEngine:
    """Loads the first plan of the policy that fits into memory; passes that run out of memory take its next steps.

    `load` leaves nothing allocated when it fails. Raises MemoryGaveOut when no fallback is left.
    """
    while isinstance(loaded := _attempt(load, policy.plan), str):
        # Outside the handler: the error's frames held what was loaded.
        gc.collect()
        policy.before_passes(loaded)
    engine = loaded

    def fall_back(cause: str, tokens: int) -> None:
        policy.in_pass(cause, tokens)
        _apply(policy.plan, engine)

    loaded.engine.split_retry.fall_back = fall_back
    return loaded


def _attempt(load: Callable[[Plan], LoadedEngine], plan: Plan) -> LoadedEngine | str:
    """The engine, or the error message if memory ran out."""
    try:
        return load(plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return cause_of(error)


def _apply(plan: Plan, loaded: LoadedEngine) -> None:
    scheduler = loaded.engine.scheduler
    scheduler.limits = _limits(plan)
    if scheduler.cache.host is not None and not any(plan.parked_blocks):
        scheduler.forget_parked()
        loaded.parking.close()
