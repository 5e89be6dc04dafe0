"""Runs the CPU kernels of attention at tiny sizes, in every KV format, and compares the results with torch's."""

from __future__ import annotations

from functools import cache

import torch

from ...quant.native import library
from ..engine.batch import pack
from ..engine.sequence import Sequence
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from ..kv.spec import KVSpec
from ..sampling.params import SamplingParams
from ..shape.model_shape import KVGroup
from .protocol import AttentionCall
from .torch_backend import TorchAttention

# The relative L2 distance allowed from torch, which rounds weights of values too, once for each of them.
_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-3}
_FORMATS = {torch.bfloat16: ("bf16", "int8", "int8/int4", "int4"), torch.float32: ("fp32", "fp16", "int8", "int4")}
_KV_HEADS, _GROUP, _DIM, _BLOCK = 2, 3, 32, 16
_LENGTHS = (70, 5, 300)


@cache
def try_native() -> str:
    """The format and dtype with wrong results, "" if there is none; the library is then not used in this process."""
    if not library.available():
        return ""
    for dtype, tolerance in _TOLERANCE.items():
        for kv_format in _FORMATS[dtype]:
            # Negated because every comparison with NaN is false.
            if not native_distance(kv_format, dtype) <= tolerance:
                wrong = f"attention over {kv_format} in {str(dtype).removeprefix('torch.')}"
                library.refuse(f"its kernels give wrong numbers here: {wrong}")
                return wrong
    return ""


@torch.inference_mode()
def native_distance(kv_format: str, dtype: torch.dtype) -> float:
    """Relative L2 distance of one token's attention in three sequences between the kernels and torch."""
    generator = torch.Generator().manual_seed(0)
    spec = KVSpec(KVGroup((0,), _KV_HEADS, _DIM, None), kv_format, _BLOCK)
    counts = [spec.blocks_for(length) for length in _LENGTHS]
    pool, free = KVPool(spec, sum(counts)), list(range(sum(counts)))[::-1]
    slots = torch.arange(sum(counts) * _BLOCK)
    k, v = (torch.randn(len(slots), _KV_HEADS, _DIM, generator=generator).to(dtype) for _ in range(2))
    pool.write(0, slots // _BLOCK, slots % _BLOCK, k, v)
    chosen = []
    for length, count in zip(_LENGTHS, counts, strict=True):
        sequence = Sequence([0] * length, SamplingParams(1))
        sequence.table.blocks, sequence.table.num_tokens = [[free.pop() for _ in range(count)]], length - 1
        chosen.append((sequence, 1))
    q = torch.randn(len(_LENGTHS), _KV_HEADS * _GROUP, _DIM, generator=generator).to(dtype)
    new_k, new_v = (side[: len(_LENGTHS)] for side in (k, v))
    mine, meant = (
        TorchAttention(KVCache([pool]), dtype, tiled=False, native=native)
        .attend(AttentionCall(0, _DIM**-0.5), q, new_k, new_v, pack(chosen))
        .float()
        for native in (True, False)
    )
    return float((mine - meant).norm() / meant.norm())
