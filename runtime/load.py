"""From a checkpoint folder and a plan to an engine that is ready for its first pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..quant.linear import Compute
from ..quant.scratch import TILE
from ..quant.workspace import Workspace
from .attention.torch_backend import TorchAttention
from .engine import Engine
from .kv.cache import KVCache
from .kv.pool import NativePool
from .kv.spec import KVSpec
from .model.packed_model import load_model
from .model.packing import WeightCensus
from .planner import Plan
from .sampling.sampler import Sampler
from .scheduler import PassLimits, Scheduler
from .shape.config import ModelConfig
from .shape.layouts import workspace_nbytes
from .shape.model_shape import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """The engine, and what became of the weights on the way."""

    engine: Engine
    census: WeightCensus


def load_engine(folder: Path, shape: ModelShape, plan: Plan) -> LoadedEngine:
    """Loads and packs the weights, allocates the cache; memory peaks at the plan's bytes and one layer."""
    dtype = DTYPES[plan.dtype]
    scratch = Workspace(workspace_nbytes(shape, plan.quant, plan.dtype, plan.deterministic))
    compute = Compute(scratch, plan.deterministic)
    model = load_model(folder, ModelConfig.read(folder), dtype, plan.quant, compute)
    cache = KVCache(
        [NativePool(KVSpec(group, plan.kv, plan.kv_block), plan.kv_blocks) for group in shape.kv_groups],
        plan.kv_blocks,
    )
    model.attention = TorchAttention(cache, dtype, tiled=plan.deterministic)
    limits = PassLimits(plan.tokens_per_pass, plan.max_sequences, TILE if plan.deterministic else 1)
    return LoadedEngine(Engine(model, Scheduler(limits, cache), Sampler()), model.census)
