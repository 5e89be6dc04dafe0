"""What computes: the executor of passes, attention, and products. Predicted by a plan, known when a model is loaded.

Torch-free.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...quant.formats.format import CODE_BITS, INTEGER_CODES, ROWS, TILES, Layout
from ...quant.matmul.row_layouts import takes_floats
from ...quant.native import library
from ..attention.choice import NO_INDEX, NO_LATENTS
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import ModelShards, model_shards
from .candidate import WeightFootprint, fuses, may_fuse
from .placement import Plan

# transformers' own forward with moedge's parts at the seams; the same with layers that the library of CPU kernels
# computes; and the whole decoder by that library, where each sequence has one token.
SEAMS, GRAPHS, FUSED_LAYERS, FUSED_DECODER = "seams", "graphs", "fused layers", "fused decoder"


@dataclass(frozen=True, slots=True)
class Kernels:
    """`executor` computes passes, `attention` is a backend, `products` what multiplies by weights, most bytes first."""

    executor: str
    attention: str
    products: str

    def __str__(self) -> str:
        return f"executor {self.executor}, attention {self.attention}, products {self.products}"


def planned_kernels(plan: Plan, shape: ModelShape) -> Kernels:
    """What is going to compute; loading decides about the executor, by what the model's modules are."""
    tiled = plan.staging is None and fuses(plan.quant, plan.dtype, plan.deterministic)
    order = TILES if plan.dtype == "bf16" and library.available() else ""
    if plan.staging is not None:
        order = ROWS
    products = product_kernels(plan, model_shards(shape, plan.quant, plan.dtype, order))
    plain = plan.attention == "native" and plan.kv == "bf16"
    seams = GRAPHS if plan.graphs_nbytes else SEAMS
    return Kernels(_executor(plan, shape, plain) if tiled else seams, plan.attention, products)


def _executor(plan: Plan, shape: ModelShape, plain: bool) -> str:
    fused = [may_fuse(layer.dense, layer.experts) for layer in shape.layers]
    if not plan.fused_nbytes or not any(fused) or shape.state_groups or not all(g.is_plain for g in shape.kv_groups):
        return SEAMS
    return FUSED_DECODER if plain and all(fused) else FUSED_LAYERS


def product_kernels(plan: Plan, shards: ModelShards) -> str:
    """What multiplies by the matrices of these shards."""
    nbytes: Counter[str] = Counter()
    dense = [(layer.dense, 1, False) for layer in shards.layers] + ([(shards.head, 1, False)] if shards.head else [])
    experts = [(layer.expert, layer.num_experts, True) for layer in shards.layers if layer.expert]
    for shard, count, is_expert in [*dense, *experts]:
        for matrix in shard.matrices:
            nbytes[_product(plan, matrix.layout, is_expert)] += count * matrix.layout.nbytes
    return ", ".join(name for name, _ in nbytes.most_common())


def _product(plan: Plan, layout: Layout, is_expert: bool) -> str:
    if plan.staging is not None:
        codes = is_expert or (CODE_BITS[layout.codes] > 0 and plan.dtype != "fp32" and not plan.deterministic)
        return "triton" if plan.grouped_products and codes and layout.order == ROWS else "torch"
    if layout.order == TILES and plan.dtype == "bf16" and library.available():
        integers = plan.compute == "int8" and layout.codes in INTEGER_CODES
        return "tiles with int8 rows" if integers else "tiles"
    return "floats by rows" if takes_floats(layout) else "torch"


def missing_kernels(weights: WeightFootprint, settings: Settings) -> dict[str, str]:
    """Why torch replaces kernels of the device, by family; families that the plan does not use are left out."""
    if weights.gpu is None:
        return {}
    unwanted = {"attention", "cache"} if settings.attention == "torch" else set()
    if weights.shape.num_experts == 0:
        unwanted.add("experts")
    lacks = dict(weights.gpu.lacks.reasons)
    if not all(group.is_plain for group in weights.shape.kv_groups):
        lack = NO_LATENTS if any(group.is_latent for group in weights.shape.kv_groups) else NO_INDEX
        lacks |= {"attention": lack, "cache": lack}
    return {family: reason for family, reason in lacks.items() if family not in unwanted}
