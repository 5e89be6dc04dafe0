"""Compares the CPU kernels that a plan's job is about to call with their definition, on the widths of its model.

What is wrong is not used: torch then computes by the definition of the formats, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from ...quant.formats.format import Layout, get_format
from ...quant.matmul.matmul import kernel_order
from ...quant.matmul.selftest import (
    ANY_KERNEL,
    Arithmetic,
    Wrong,
    wrong_experts,
    wrong_packing,
    wrong_product,
    wrong_widening,
)
from ...quant.matmul.thread_pool import torch_threads
from ...quant.native import library
from ...quant.tensor import TORCH_DTYPES
from ..attention.latent import LatentAttention
from ..attention.selftest import Heads, heads_of, wrong_attention
from ..attention.torch_backend import TorchAttention
from ..plan.placement import Plan
from ..settings.errors import WrongNumbers
from ..shape.model_shape import ModelShape
from ..shape.shards import FLOAT_NAMES, model_shards


def checked(shape: ModelShape, plan: Plan) -> Plan:
    """The plan; where a kernel that it calls on the CPU is wrong, one by torch alone, with a note that says why.

    Raises WrongNumbers where torch is wrong, too.
    """
    if ANY_KERNEL.get():
        return plan
    if not library.refused() and (wrong := first_wrong(shape, plan)):
        library.refuse(f"{wrong}")
        forget()
        if still := first_wrong(shape, by_definition(plan)):
            raise WrongNumbers(f"torch's own kernels are wrong here: {still}; reinstall torch")
    return by_definition(plan) if library.refused() else plan


def first_wrong(shape: ModelShape, plan: Plan) -> Wrong | None:
    """The first thing that a plan's kernels compute wrongly on the widths of a model, if there is any."""
    # Threads would wait for one another longer than they compute.
    with torch_threads(1):
        return next(_wrong(shape, plan), None)


def forget() -> None:
    """Compares kernels again that were compared before, for those who change them."""
    for known in (_wrong_packing, _wrong_widening, _wrong_product, _wrong_experts, _wrong_attention):
        known.cache_clear()


def by_definition(plan: Plan) -> Plan:
    """The plan without CPU kernels, which were refused: torch dequantizes matrices and computes attention."""
    note = f"torch computes instead of the CPU kernels, slower: {library.lack()}"
    attention = "torch" if plan.attention == "native" else plan.attention
    return replace(plan, attention=attention, compute="float", fused_nbytes=0, notes=(*plan.notes, note))


def _wrong(shape: ModelShape, plan: Plan) -> Iterator[Wrong]:
    """All of a job that computes on the CPU; packing alone where a device computes, which has tests of its own."""
    dtype, on_cpu = TORCH_DTYPES[plan.dtype], plan.staging is None
    order = kernel_order(plan.quant, dtype, "cpu" if on_cpu else "cuda")
    shards = model_shards(shape, plan.quant, plan.dtype, order)
    matrices = [layer.expert.matrices for layer in shards.layers if layer.expert]
    experts = [(up.layout, down.layout) for up, down in matrices]
    dense = [layer.dense for layer in shards.layers] + ([shards.head] if shards.head else [])
    layouts = [matrix.layout for shard in dense for matrix in shard.matrices]
    layouts += [layout for pair in experts for layout in pair]
    yield from filter(None, map(_wrong_packing, dict.fromkeys(layouts)))
    yield from filter(None, map(_wrong_widening, dict.fromkeys(_kept(shape, FLOAT_NAMES[plan.dtype]))))
    if not on_cpu:
        return
    how = Arithmetic(dtype, plan.compute == "int8", plan.deterministic)
    yield from filter(None, (_wrong_product(layout, how) for layout in dict.fromkeys(layouts)))
    yield from filter(None, (_wrong_experts(up, down, how) for up, down in dict.fromkeys(experts)))
    if plan.attention == "native":
        yield from filter(None, (_wrong_attention(each, dtype) for each in heads_of(shape, plan.kv, plan.kv_block)))


def _kept(shape: ModelShape, dtype: str) -> Iterator[Layout]:
    """What a quantized checkpoint has that may have to be widened, each in its own order."""
    for layer in shape.layers:
        experts = (layer.experts.up, layer.experts.down) if layer.experts else ()
        for matrix in (*layer.dense, *experts):
            if matrix.kept:
                yield get_format(matrix.kept).layout((matrix.rows, matrix.cols), dtype)


# Once in a process: an engine may be loaded many times.
_wrong_packing, _wrong_widening = cache(wrong_packing), cache(wrong_widening)
_wrong_product, _wrong_experts = cache(wrong_product), cache(wrong_experts)


@cache
def _wrong_attention(heads: Heads, dtype: torch.dtype) -> Wrong | None:
    kind = LatentAttention if heads.group.is_latent else TorchAttention
    return wrong_attention(heads, dtype, lambda cache: kind(cache, dtype, tiled=False, native=True))
