"""From a model source and a plan to an engine that is ready for its first pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from ..offload.arena import Arena
from ..offload.checkpoint.checkpoint import Checkpoint
from ..offload.store.store import Store
from ..quant.linear import Compute
from .attention.torch_backend import TorchAttention
from .computing import make_compute
from .dtypes import DTYPES
from .engine import Engine
from .kv.cache import KVCache
from .kv.chain import root_hash
from .kv.pool import KVPool
from .kv.spec import KVSpec
from .model.assembly import LayerAssembly, install_head
from .model.definition import define
from .model.packed_model import PackedModel
from .model.weights_seam import ArrivingLayers
from .model_source import ModelSource
from .plan.planner import Plan
from .plan.preparing import WINDOW_COPIES, WINDOW_NBYTES
from .sampling.sampler import Sampler
from .scheduler import PassLimits, Scheduler
from .shape.config import ModelConfig
from .shape.model_shape import ModelShape
from .shape.shards import ModelShards, model_shards
from .weights.in_memory import MemorySink
from .weights.preparation import Preparation
from .weights.stored import read_resident
from .weights.streaming import StreamedWeights


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """The engine, what its weights are packed as, and where they stream from, if they do."""

    engine: Engine
    shards: ModelShards
    streamed: StreamedWeights | None = None

    def close(self) -> None:
        self.engine.close()
        if self.streamed is not None:
            self.streamed.close()


def load_engine(source: ModelSource, plan: Plan, store: Path | None = None) -> LoadedEngine:
    """Weights come from `store` where there is one, else from the source's checkpoint, all into memory."""
    shape, shards = source.shape, model_shards(source.shape, plan.quant, plan.dtype)
    compute = make_compute(shape, plan)
    model = define(ModelConfig.read(source.folder), DTYPES[plan.dtype])
    if store is None:
        _load_all(model, source.folder, shards, plan, compute)
        return LoadedEngine(_engine(PackedModel(model, compute), shape, plan), shards)
    streamed = _open_store(model, Store.open(store), shards, plan, compute)
    return LoadedEngine(_engine(PackedModel(model, compute), shape, plan), shards, streamed)


def _engine(model: PackedModel, shape: ModelShape, plan: Plan) -> Engine:
    cache = _cache(shape, plan)
    model.attention = TorchAttention(cache, DTYPES[plan.dtype], tiled=plan.deterministic)
    limits = PassLimits(plan.tokens_per_pass, plan.max_sequences)
    return Engine(model, Scheduler(limits, cache), Sampler())


def _cache(shape: ModelShape, plan: Plan) -> KVCache:
    specs = [KVSpec(group, plan.kv, plan.kv_block) for group in shape.kv_groups]
    pools = [KVPool(spec, count) for spec, count in zip(specs, plan.kv_blocks, strict=True)]
    host = [Arena(spec.block_nbytes, count).slots() for spec, count in zip(specs, plan.parked_blocks, strict=True)]
    # One cache serves one model: beside tokens, only what its settings say makes keys and values differ.
    settings = (shape, plan.dtype, plan.quant, plan.kv, plan.kv_block, plan.deterministic, plan.compute)
    return KVCache(pools, root=root_hash(settings), host_slots=host if any(plan.parked_blocks) else None)


def _load_all(model: PreTrainedModel, folder: Path, shards: ModelShards, plan: Plan, compute: Compute) -> None:
    sink = MemorySink()
    with Checkpoint(folder) as checkpoint:
        # What a pass will compute with is not in use yet: experts are converted there.
        room = (plan.kv_nbytes + plan.scratch_nbytes) // (WINDOW_COPIES + 1)
        preparation = Preparation(model, checkpoint, compute, min(room, WINDOW_NBYTES))
        preparation.run(shards, sink)
    for layer, layer_bytes in zip(preparation.layers, sink.layers, strict=True):
        layer_bytes.bind(layer)
    install_head(model, shards.head, sink.head_shard, compute)
    _tile_routers(preparation.layers, compute)
    num_layers = len(preparation.layers)
    decoder = model.get_decoder()
    decoder.layers = ArrivingLayers(decoder.layers, lambda: iter(range(num_layers)))


def _open_store(
    model: PreTrainedModel, store: Store, shards: ModelShards, plan: Plan, compute: Compute
) -> StreamedWeights:
    decoder = model.get_decoder()
    layers = [LayerAssembly(*pair, compute) for pair in zip(decoder.layers, shards.layers, strict=True)]
    for layer in layers:
        layer.install()
    read_resident(store, model)
    streamed = StreamedWeights(store, shards, plan.placement, layers)
    install_head(model, shards.head, streamed.head_shard, compute)
    _tile_routers(layers, compute)
    decoder.layers = ArrivingLayers(decoder.layers, streamed.arrivals)
    return streamed


def _tile_routers(layers: list[LayerAssembly], compute: Compute) -> None:
    """Routers are transformers' own: tiles keep a row's scores from depending on how many rows there are."""
    if compute.deterministic:
        for layer in layers:
            layer.tile_routers()
