"""From a checkpoint folder and a plan to an engine that is ready for its first pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..offload.checkpoint import Checkpoint
from ..quant.linear import Compute
from ..quant.scratch import TILE
from ..quant.workspace import Workspace
from .attention.torch_backend import TorchAttention
from .engine import Engine
from .in_memory import MemorySink
from .kv.cache import KVCache
from .kv.pool import NativePool
from .kv.spec import KVSpec
from .model.assembly import install_head
from .model.definition import define
from .model.packed_model import PackedModel
from .model.packing import Packer, WeightCensus
from .model.weights_seam import ArrivingLayers
from .planner import Plan
from .prepare import Preparation
from .sampling.sampler import Sampler
from .scheduler import PassLimits, Scheduler
from .shape.config import ModelConfig
from .shape.layouts import workspace_nbytes
from .shape.model_shape import ModelShape
from .shape.shards import model_shards

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """The engine, and what became of the weights on the way."""

    engine: Engine
    census: WeightCensus


def load_engine(folder: Path, shape: ModelShape, plan: Plan) -> LoadedEngine:
    """Loads and packs the weights, allocates the cache; memory peaks at the plan's bytes and a window of experts."""
    dtype = DTYPES[plan.dtype]
    scratch = Workspace(workspace_nbytes(shape, plan.quant, plan.dtype, plan.deterministic))
    packer = Packer(plan.quant)
    model = _load_in_memory(folder, shape, plan, packer, Compute(scratch, plan.deterministic))
    cache = KVCache(
        [NativePool(KVSpec(group, plan.kv, plan.kv_block), plan.kv_blocks) for group in shape.kv_groups],
        plan.kv_blocks,
    )
    model.attention = TorchAttention(cache, dtype, tiled=plan.deterministic)
    limits = PassLimits(plan.tokens_per_pass, plan.max_sequences, TILE if plan.deterministic else 1)
    return LoadedEngine(Engine(model, Scheduler(limits, cache), Sampler()), packer.census)


def _load_in_memory(folder: Path, shape: ModelShape, plan: Plan, packer: Packer, compute: Compute) -> PackedModel:
    model = define(ModelConfig.read(folder), DTYPES[plan.dtype])
    shards = model_shards(shape, plan.quant, plan.dtype)
    sink = MemorySink()
    with Checkpoint(folder) as checkpoint:
        preparation = Preparation(model, checkpoint, packer, compute)
        preparation.run(shards, sink)
    for index, layer in enumerate(preparation.layers):
        sink.bind(index, layer)
    install_head(model, shards.head, sink.head_shard, compute)
    decoder = model.get_decoder()
    num_layers = len(decoder.layers)
    decoder.layers = ArrivingLayers(decoder.layers, lambda: iter(range(num_layers)))
    return PackedModel(model)
