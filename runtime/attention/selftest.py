"""Compares attention that a job is about to call with its definition: torch's, in float32 over the same codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant.matmul.selftest import BOUNDS, Wrong, errors
from ...quant.tensor import dtype_name
from ..engine.sequence import Batch, Sequence, pack
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from ..kv.spec import KVSpec
from ..sampling.params import SequenceSampling
from ..shape.model_shape import KVGroup, ModelShape
from .latent import LatentAttention
from .protocol import AttentionBackend, AttentionCall, LatentWeights, StoreFunction
from .torch_backend import TorchAttention

# Of a bfloat16 row's units of roundoff: queries of quantized keys are rounded to integers of 8 bits, and weights again.
# A key of a few hundred that is left out makes more.
ROUNDINGS = 4
# The relative L2 error allowed in stored vectors: a few codes near a rounding boundary may be rounded the other way.
_STORED = 0.02
# Rows of keys and of values that latents are expanded to: matrices of torch's own products, beside the kernels.
_EXPANDED = 16


class HeadCase(NamedTuple):
    """The heads of a layer group: of keys and values in one KV format, and `queries` for each of them."""

    group: KVGroup
    kv_format: str
    queries: int
    block: int = 32

    @property
    def name(self) -> str:
        group = self.group
        reach = "" if group.window is None else f", window {group.window}"
        return f"{group.kv_heads} x {self.queries} heads of {group.head_dim} over {self.kv_format}{reach}"


class Chunks(NamedTuple):
    """The chunks (past, count) of a pass; `capped`: scores have a softcap and sinks."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    capped: bool = False


# One token each: together they are work for all threads, one alone is split among them, or among programs of a GPU.
DECODE = (Chunks("decode", ((69, 1), (4, 1), (299, 1))), Chunks("split", ((599, 1),), capped=True))
EXTEND = (Chunks("extend", ((35, 5), (2, 5))),)


def heads_of(shape: ModelShape, kv_format: str, block: int) -> Iterator[HeadCase]:
    """The distinct heads of a model; indexers of sparse attention have none."""
    found: dict[HeadCase, None] = {}
    for group in shape.kv_groups:
        if not group.is_index:
            queries = group.query_heads or max(1, _query_heads(shape, group) // group.kv_heads)
            # Which layers they are makes no difference.
            found[HeadCase(replace(group, layers=(0,)), kv_format, queries, block)] = None
    return iter(found)


def _query_heads(shape: ModelShape, group: KVGroup) -> int:
    """Of the group's first layer, by the columns of its output projection; four for a KV head where it has none."""
    dense = shape.layers[group.layers[0]].dense
    columns = (each.cols for each in dense if each.name.endswith("o_proj"))
    return next(columns, 4 * group.kv_heads * group.head_dim) // group.head_dim


@torch.inference_mode()
def wrong_attention(
    heads: HeadCase,
    dtype: torch.dtype,
    make: Callable[[KVCache], AttentionBackend],
    passes: tuple[Chunks, ...] = DECODE,
    device: torch.device | str = "cpu",
) -> Wrong | None:
    """The first pass whose attention by the backend of `make` is beyond the bound, if there is one.

    Raises what the backend raises.
    """
    bound = ROUNDINGS * BOUNDS[dtype_name(dtype)]
    for each in passes:
        error = attention_error(heads, dtype, make, each, device)
        # Negated, since every comparison with NaN is false.
        if not error <= bound:
            return Wrong(f"attention ({each.name}) of {heads.name}", error, bound)
    return None


def attention_error(
    heads: HeadCase,
    dtype: torch.dtype,
    make: Callable[[KVCache], AttentionBackend],
    chunks: Chunks,
    device: torch.device | str = "cpu",
) -> float:
    """The largest relative L2 distance of a row of a head from the definition; NaN for what was not written."""
    case = _Case(heads, dtype, chunks)
    meant_pool, pool = case.stored_pool("cpu"), case.stored_pool(device)
    q, k, v = (x.to(device) for x in case.qkv)
    found = make(KVCache([pool])).attend(case.call(dtype, device), q, k, v, case.batch)
    kind = LatentAttention if heads.group.is_latent else TorchAttention
    definition = kind(KVCache([meant_pool]), torch.float32, tiled=False)
    q, k, v = (x.float() for x in case.qkv)
    wanted = definition.attend(case.call(torch.float32, "cpu"), q, k, v, case.batch)
    # Python's max would lose a NaN that does not come first.
    return float(errors(found.cpu(), wanted).max())


def wrong_store(heads: HeadCase, dtype: torch.dtype, store: StoreFunction, device: torch.device | str) -> Wrong | None:
    """Whether `store` writes other keys and values than the codec does: a few codes may be rounded the other way."""
    case = _Case(heads, dtype, Chunks("store", ((0, 21),)))
    wanted, pool = KVPool(case.spec, 3), KVPool(case.spec, 3, device)
    slots = torch.randperm(3 * heads.block, generator=torch.Generator().manual_seed(0))[:21]
    k, v = case.qkv[1:]
    store(pool, 0, slots.to(device), k.to(device), v.to(device))
    blocks, offsets = slots // heads.block, slots % heads.block
    wanted.write(0, blocks, offsets, k, v)
    found = pool.tokens(0, blocks.to(device), offsets.to(device), torch.float32)
    meant = wanted.tokens(0, blocks, offsets, torch.float32)
    error = max(float(errors(one.cpu(), two).nan_to_num(nan=1e9).max()) for one, two in zip(found, meant, strict=True))
    # What was not to be written stays.
    elsewhere = float((pool.memory.bytes.cpu() != wanted.memory.bytes).float().mean())
    bound = _STORED if pool.quantized else 0.0
    if error <= bound and elsewhere <= bound:
        return None
    return Wrong(f"storing {heads.name}", max(error, elsewhere), bound)


class _Case:
    """Random queries, keys and values of a pass, and sequences whose blocks are in no order."""

    def __init__(self, heads: HeadCase, dtype: torch.dtype, chunks: Chunks) -> None:
        self.spec = KVSpec(heads.group, heads.kv_format, heads.block)
        self._heads, self._dtype, self._capped = heads, dtype, chunks.capped
        self._random = torch.Generator().manual_seed(0)
        counts = [self.spec.blocks_for(past + count) for past, count in chunks.chunks]
        self._blocks = sum(counts)
        free = torch.randperm(self._blocks, generator=self._random).tolist()
        chosen = []
        for (past, count), blocks in zip(chunks.chunks, counts, strict=True):
            sequence = Sequence([0] * (past + count), SequenceSampling(1))
            sequence.table.blocks, sequence.table.num_tokens = [[free.pop() for _ in range(blocks)]], past
            chosen.append((sequence, count))
        self.batch: Batch = pack(chosen)
        group, rows = heads.group, self.batch.num_tokens
        width = _EXPANDED + group.value_dim if group.is_latent else group.head_dim
        kv = self._keys_and_values(rows)
        self.qkv = (self._draw(rows, heads.queries * group.kv_heads, width), *kv)
        self._matrix = self._draw(heads.queries * group.kv_heads, 2 * _EXPANDED, group.head_dim) / 4
        self._past = self._keys_and_values(self._blocks * heads.block)

    def stored_pool(self, device: torch.device | str) -> KVPool:
        """A pool with keys and values in every slot."""
        pool, block = KVPool(self.spec, self._blocks, device), self._heads.block
        slots = torch.arange(self._blocks * block, device=device)
        pool.write(0, slots // block, slots % block, *(side.to(device) for side in self._past))
        return pool

    def call(self, dtype: torch.dtype, device: torch.device | str) -> AttentionCall:
        group, heads = self._heads.group, self.qkv[0].shape[1]
        latent = LatentWeights(self._matrix.to(device, dtype), _EXPANDED) if group.is_latent else None
        capped = self._capped and latent is None
        sinks = torch.linspace(-2, 3, heads, device=device).to(dtype) if capped else None
        scale, softcap = self.qkv[0].shape[2] ** -0.5, 20.0 if capped else None
        return AttentionCall(0, scale, group.window, softcap=softcap, sinks=sinks, latent=latent)

    def _keys_and_values(self, rows: int) -> tuple[Tensor, Tensor]:
        group = self._heads.group
        return self._draw(rows, group.kv_heads, group.head_dim), self._draw(rows, group.kv_heads, group.value_dim)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self._dtype)
