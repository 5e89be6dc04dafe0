"""Runs the attention kernels and the kernel that stores keys and values at tiny sizes, in every KV format, and compares
the results with the formats' definitions. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...quant.kernels.gpu import Gpu
from ...quant.kernels.trial import TOLERANCE
from ...quant.kv.codec import decode
from ..engine.batch import Batch, pack
from ..engine.sequence import Sequence
from ..kv.pool import KVPool
from ..kv.spec import KVSpec
from ..sampling.params import SamplingParams
from ..shape.model_shape import KVGroup
from .kernels.launch import Cached, attend_launches, store_launch
from .kernels.operands import Features, Side
from .kernels.tuning import decode_cut, extend_cut, has_dot
from .pass_pages import PassPages

# Formats beside the native one: first with keys and values in the same format, then in different ones.
_QUANTIZED = ("int8", "int4", "int8/int4")
_NATIVE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# The relative L2 error allowed in stored vectors: a few codes near a rounding boundary may be rounded the other way.
STORED_TOLERANCE = 0.02
_KV_HEADS, _GROUP, _BLOCK = 2, 4, 32
# The tokens of the two sequences, and how many of the last ones an extend computes: they lie in two blocks.
_LENGTHS, _EXTENDED = (67, 7), 5
_SPLITS = 2
# The blocks of each sequence, in no order.
_TABLES = ((4, 0, 2), (1,))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A kernel (`decode`, `split`, `extend`) over keys and values of one format."""

    kernel: str
    kv: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.kernel} over {self.kv} with heads of {self.head_dim}"

    @property
    def features(self) -> bool:
        """Whether the case has softcap, sinks and a shift of scores: kernels are compiled with them and without."""
        return self.kernel == "split"

    @property
    def window(self) -> int | None:
        return 40 if self.kernel == "extend" else None


def kv_formats(dtype: torch.dtype) -> tuple[str, ...]:
    return (_NATIVE[dtype], *_QUANTIZED)


def attention_cases(gpu: Gpu, dtype: torch.dtype, head_dims: frozenset[int]) -> Iterator[AttentionCase]:
    """The cases that run on such a GPU: without usable tensor cores torch replaces the extend kernel."""
    kernels = ("decode", "split", "extend") if has_dot(gpu.capability) else ("decode", "split")
    for head_dim in sorted(head_dims):
        for kv in kv_formats(dtype):
            yield from (AttentionCase(kernel, kv, head_dim) for kernel in kernels)


def try_attention(torch_device: torch.device, gpu: Gpu, dtype: torch.dtype, head_dims: frozenset[int]) -> str:
    """The name of the first case with wrong results, "" where there is none. Raises what Triton and CUDA raise."""
    for case in attention_cases(gpu, dtype, head_dims):
        # Negated because every comparison with NaN is false.
        if not attention_error(case, torch_device, gpu, dtype) <= TOLERANCE[dtype]:
            return case.name
    return ""


def try_storing(torch_device: torch.device, dtype: torch.dtype, head_dims: frozenset[int]) -> str:
    """Does what `try_attention` does for the kernel that stores keys and values."""
    for head_dim in sorted(head_dims):
        for kv in kv_formats(dtype):
            if not stored_error(kv, head_dim, torch_device, dtype) <= (STORED_TOLERANCE if kv in _QUANTIZED else 0.0):
                return f"storing {kv} with heads of {head_dim}"
    return ""


@torch.inference_mode()
def stored_error(kv: str, head_dim: int, torch_device: torch.device, dtype: torch.dtype) -> float:
    """Relative L2 distance between a pool that the kernel wrote and one that the codec wrote on the CPU."""
    mine, wanted = (_pool(kv, head_dim, device) for device in (torch_device, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    tokens = 21
    k, v = (torch.randn(tokens, _KV_HEADS, head_dim, generator=generator).to(dtype) for _ in range(2))
    slots = torch.randperm(len(wanted.memory) * _BLOCK, generator=generator)[:tokens]
    store_launch(k.to(torch_device), v.to(torch_device), _cached(mine), slots.to(torch_device)).run()
    _write_codes(wanted, slots, k, v)
    pairs = zip(_decoded(mine), _decoded(wanted), strict=True)
    distances = [float((found - meant).norm() / meant.norm()) for found, meant in pairs]
    # Python's max would lose a NaN that does not come first.
    return sum(distances)


@torch.inference_mode()
def attention_error(case: AttentionCase, torch_device: torch.device, gpu: Gpu, dtype: torch.dtype) -> float:
    """The largest difference from float64 over the same codes, relative to the largest value; NaN for missing rows."""
    generator = torch.Generator().manual_seed(0)
    pool = _pool(case.kv, case.head_dim, torch.device("cpu"))
    shape = (len(pool.memory) * _BLOCK, _KV_HEADS, case.head_dim)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    _write_codes(pool, torch.arange(shape[0]), k, v)
    tested = _pool(case.kv, case.head_dim, torch_device)
    tested.memory.bytes.copy_(pool.memory.bytes.to(torch_device))
    spans = _spans(case)
    heads = _KV_HEADS * _GROUP
    num_rows = sum(end - begin for begin, end in spans)
    q = torch.randn(num_rows, heads, case.head_dim, generator=generator).to(dtype)
    shift = torch.randn(num_rows, heads, generator=generator) if case.features else None
    sinks = torch.linspace(-2, 3, heads) if case.features else None
    features = Features(
        case.head_dim**-0.5,
        case.window,
        None,
        20.0 if case.features else None,
        _to(sinks, torch_device),
        _to(shift, torch_device),
    )
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=torch_device)
    _launch(case, q.to(torch_device), out, tested, features, gpu)
    meant = _by_definition(q, pool, spans, features._replace(sinks=sinks, shift=shift))
    return float((out.cpu().double() - meant).abs().max() / meant.abs().max())


def _launch(
    case: AttentionCase, q: torch.Tensor, out: torch.Tensor, pool: KVPool, features: Features, gpu: Gpu
) -> None:
    wide, cached = out.dtype == torch.float32, _cached(pool)
    if case.kernel == "extend":
        cut = extend_cut(case.head_dim, _GROUP, wide, cached.is_mixed)
    else:
        cut = decode_cut(gpu.capability, case.head_dim, _GROUP, wide, cached.kind)
    tokens = cut.rows // cut.heads if case.kernel == "extend" else 1
    pages = PassPages(_batch(_spans(case)), 0, _BLOCK, q.device).tiled((0, 1), tokens)
    splits = _SPLITS if case.kernel == "split" else 1
    for launch in attend_launches(q, out, cached, pages, features, cut, splits):
        launch.run()


def _by_definition(q: torch.Tensor, pool: KVPool, spans: list[tuple[int, int]], features: Features) -> torch.Tensor:
    """Attention [T, Hq, D] in float64 over the keys and values of the pool."""
    sides, parts, row = [side.double() for side in _decoded(pool)], [], 0
    for (begin, end), table in zip(spans, _TABLES, strict=True):
        rows = slice(row, row := row + end - begin)
        # [blocks, H, block, D] to [tokens, Hq, D].
        keys, values = (
            side[list(table)].transpose(1, 2).flatten(0, 1)[:end].repeat_interleave(_GROUP, 1) for side in sides
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys)
        if features.shift is not None:
            scores += features.shift[rows].double().T[:, :, None]
        scores *= features.scale
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        row_at, key_at = torch.arange(begin, end)[:, None], torch.arange(end)
        hidden = key_at > row_at
        if features.window is not None:
            hidden |= key_at <= row_at - features.window
        scores.masked_fill_(hidden, float("-inf"))
        if features.sinks is not None:
            scores = torch.cat([scores, features.sinks.double()[:, None, None].expand(-1, end - begin, 1)], 2)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :end], values))
    return torch.cat(parts)


def _spans(case: AttentionCase) -> list[tuple[int, int]]:
    """The positions of each sequence that are computed: the last one, or the last few."""
    count = _EXTENDED if case.kernel == "extend" else 1
    return [(length - count, length) for length in _LENGTHS]


def _batch(spans: list[tuple[int, int]]) -> Batch:
    """A pass of the last tokens of two sequences; their earlier tokens are stored."""
    chosen = []
    for (begin, end), blocks in zip(spans, _TABLES, strict=True):
        sequence = Sequence([0] * end, SamplingParams(1))
        sequence.table.blocks, sequence.table.num_tokens = [list(blocks)], begin
        chosen.append((sequence, end - begin))
    return pack(chosen)


def _pool(kv: str, head_dim: int, torch_device: torch.device) -> KVPool:
    return KVPool(KVSpec(KVGroup((0,), _KV_HEADS, head_dim, None), kv, _BLOCK), 5, torch_device)


def _cached(pool: KVPool) -> Cached:
    keys, values = (Side.of(*planes) for planes in pool.planes(0))
    return Cached(keys, values, _BLOCK)


def _write_codes(pool: KVPool, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k and v unchanged: subtracting an offset from quantized keys is not the kernels' work."""
    pool.key_transform = None
    pool.write(0, slots // _BLOCK, slots % _BLOCK, k, v)


def _decoded(pool: KVPool) -> list[torch.Tensor]:
    """Keys and values [blocks, H, block, D] in float32, on the CPU."""
    sides = []
    for coded, vectors in zip(pool.planes(0), pool.formats, strict=True):
        codes, *factors = (None if plane is None else plane.cpu() for plane in coded)
        assert codes is not None
        # Scales and zeros are stored by group, then by token: [.., G, N] becomes [.., N, G].
        per_token = (None if plane is None else plane.transpose(2, 3) for plane in factors)
        sides.append(decode(type(coded)(codes, *per_token), vectors, torch.float32))
    return sides


def _to(x: torch.Tensor | None, torch_device: torch.device) -> torch.Tensor | None:
    return None if x is None else x.to(torch_device)
