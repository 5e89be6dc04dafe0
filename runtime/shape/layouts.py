"""In which layout a matrix is packed, and what a model's matrices take. Torch-free: planner and packer agree by it."""

from __future__ import annotations

from collections.abc import Iterator

from ...quant.format import FormatError, Layout, get_format
from ...quant.scratch import scratch_nbytes
from .model_shape import Matrix, ModelShape

# The formats that `auto` considers, from exact to smallest.
FORMATS = ("none", "int8", "int4", "nf4")
FLOAT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_NBYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def layout_for(shape: tuple[int, int], format_name: str, dtype: str) -> Layout:
    """The layout of a matrix [N, K] of `dtype` (torch's name); int8 where the format cannot hold its shape."""
    try:
        return get_format(format_name).layout(shape, dtype)
    except FormatError:
        return get_format("int8").layout(shape, dtype)


def resident_nbytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of what is always in memory: embedding, norms, routers, biases."""
    numel = shape.embedding_numel + shape.resident_numel + sum(layer.resident_numel for layer in shape.layers)
    return numel * ITEM_NBYTES[dtype]


def workspace_nbytes(shape: ModelShape, format_name: str, dtype: str, deterministic: bool) -> int:
    """Scratch that products with any of the model's matrices need."""
    tied = Matrix("tied head", shape.vocab, shape.hidden)
    layouts = [_layout(matrix, format_name, dtype) for matrix in _matrices(shape)]
    layouts.append(_layout(tied, "none", dtype))
    return max(scratch_nbytes(layout, FLOAT_NAMES[dtype], deterministic) for layout in layouts)


def helper_nbytes(shape: ModelShape, format_name: str, dtype: str, deterministic: bool) -> int:
    """Scratch of a thread that helps: with experts, in deterministic passes with every product."""
    if deterministic:
        return workspace_nbytes(shape, format_name, dtype, deterministic)
    experts = [layer.experts for layer in shape.layers if layer.experts]
    layouts = [_layout(matrix, format_name, dtype) for expert in experts for matrix in (expert.up, expert.down)]
    return max((scratch_nbytes(layout, FLOAT_NAMES[dtype], deterministic) for layout in layouts), default=0)


def _matrices(shape: ModelShape) -> Iterator[Matrix]:
    """Every kind of packed matrix."""
    if shape.head:
        yield shape.head
    for layer in shape.layers:
        yield from layer.dense
        if layer.experts:
            yield from (layer.experts.up, layer.experts.down)


def _layout(matrix: Matrix, format_name: str, dtype: str) -> Layout:
    return layout_for((matrix.rows, matrix.cols), format_name, FLOAT_NAMES[dtype])
