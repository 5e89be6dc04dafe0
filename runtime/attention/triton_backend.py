"""Attention with Triton kernels that read blocks in place, in the format of the KV cache. Imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from ...quant.kernels.gpu import Gpu
from ...quant.kernels.product import Launch
from ...quant.kv.codec import Coded, decode
from ..engine.sequence import Batch
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from .kernels.launch import Cached, LayerSample, attend_launches, store_launch, warm_up_launches
from .kernels.operands import Cut, Features, Side, decode_cut, extend_cut, has_dot, num_splits
from .protocol import AttentionCall, Division, Fresh, PassPages, check_reach
from .torch_backend import TorchAttention, attend_fresh

Varlen = Callable[..., torch.Tensor]
# The limits of the kernel in torch's binaries: 16-bit types, Ampere or newer, heads of a multiple of 8 up to 256.
FLASH_CAPABILITY = (8, 0)
FLASH_TYPES = (torch.bfloat16, torch.float16)


class FreshAttention:
    """`varlen` is torch.nn.attention.varlen.varlen_attn where it supports the run, else None."""

    def __init__(self, varlen: Varlen | None) -> None:
        self._varlen = varlen
        self._arguments = frozenset(signature(varlen).parameters) if varlen is not None else frozenset()

    @classmethod
    def for_gpu(cls, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> Self:
        serves = capability >= FLASH_CAPABILITY and dtype in FLASH_TYPES and head_dim <= 256 and head_dim % 8 == 0
        return cls(find_varlen() if serves else None)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fresh: Fresh
    ) -> torch.Tensor:
        """q [n, Hq, D], k, v [n, Hkv, D] as the cache stores them, one prompt after the other -> [n, Hq, D]."""
        if self._varlen is not None:
            return self._flash(call, q, k, v, fresh)
        parts = zip(*(torch.split(x, fresh.counts) for x in (q, k, v)), strict=True)
        return torch.cat([attend_fresh(call, *part) for part in parts])

    def _flash(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fresh: Fresh
    ) -> torch.Tensor:
        assert self._varlen is not None
        longest = max(fresh.counts)
        # (-1, 0): all earlier tokens, and the token itself.
        options: dict[str, Any] = {"scale": call.scale, "window_size": (-1, 0)}
        if "enable_gqa" in self._arguments:
            # Before torch 2.12 this argument did not exist, and fewer KV heads were accepted without it.
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        return self._varlen(q, k, v, fresh.bounds, fresh.bounds, longest, longest, **options)


def find_varlen() -> Varlen | None:
    """torch's function; None where this version of torch does not have it."""
    try:
        varlen: Varlen = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return varlen


def read_back(pool: KVPool, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, H, D] of slots [n], decoded from the cache."""
    blocks, offsets = slots // pool.spec.block, slots % pool.spec.block

    def take(codes: torch.Tensor, *factors: torch.Tensor | None) -> Coded:
        return Coded(codes[blocks, :, offsets], *(f if f is None else f[blocks, :, :, offsets] for f in factors))

    sides = zip(pool.planes(layer), pool.formats, strict=True)
    keys, values = (decode(take(*planes), vectors, dtype) for planes, vectors in sides)
    return keys, values


class TritonAttention:
    """Prompts without a past go to flash attention or SDPA, single tokens to split-KV decode, the rest to extend.

    `tiled` sends every row through extend, whose tiles of rows and keys are aligned to positions in the sequence: the
    bits of a token's result then depend neither on its chunk nor on the batch.

    On GPUs before sm80, whose tensor cores Triton does not use, torch replaces the extend kernel.
    """

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        gpu: Gpu,
        device: torch.device | str = "cpu",
        stores_by_kernel: bool = True,
    ) -> None:
        """`stores_by_kernel`: a Triton kernel writes keys and values into the cache, not torch."""
        self.cache = cache
        self._stores_by_kernel = stores_by_kernel
        self.gpu = gpu
        self._tiled = tiled
        self._torch_extend = None if has_dot(gpu.capability) else TorchAttention(cache, dtype, tiled, device)
        head_dims = {pool.spec.group.head_dim for pool in cache.pools}
        # The interpreter has no flash attention: torch's is for GPUs.
        capability = gpu.capability if torch.device(device).type == "cuda" else (0, 0)
        self._fresh = {size: FreshAttention.for_gpu(capability, dtype, size) for size in head_dims}
        # Every layer's call, and a row of zeros [1, Hq, D] shaped as its queries; known after the first pass.
        self._asked: dict[int, tuple[AttentionCall, torch.Tensor]] = {}
        self._pages: WeakKeyDictionary[Batch, dict[int, PassPages]] = WeakKeyDictionary()

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        layer_index = self.cache.layer_indices[call.layer]
        pool, pages = self.cache.pools[layer_index.group], self._pages_of(batch, layer_index.group, q.device)
        check_reach(call, pool.spec.group)
        if call.layer not in self._asked:
            self._asked[call.layer] = (call, torch.zeros(1, *q.shape[1:], dtype=q.dtype, device=q.device))
        cached = _cached(pool, layer_index.index)
        # Before anything is read: a sequence may attend to what another one stores in this pass.
        if self._stores_by_kernel:
            store_by_kernel(pool, layer_index.index, pages.slots, k, v)
        else:
            pool.write(layer_index.index, pages.slots // self.cache.block, pages.slots % self.cache.block, k, v)
        work = pages.divide(call, self._tiled)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        layer = _LayerPass(
            call, pool, layer_index.index, pool.queries(q), _shift(pool, layer_index.index, call, q), out, pages
        )
        if work.fresh:
            layer.fresh(work.fresh, self._fresh[q.shape[2]])
        if work.decode:
            layer.decode(cached, work, self.gpu)
        if work.extend and self._torch_extend is None:
            layer.extend(cached, work.extend)
        elif work.extend and self._torch_extend is not None:
            for chunk in (batch.chunks[index] for index in work.extend):
                rows = slice(chunk.begin, chunk.end)
                self._torch_extend.attend_past(call, layer_index, chunk, q[rows], out[rows])
        return out

    def warm_up_launches(self) -> list[Launch]:
        """Launches that compile every kernel that a job may need and compute nothing, to run before it begins.

        They cover the layers that a pass has gone through: none before the first pass.
        """
        samples = [self._sample(call, q) for call, q in self._asked.values()]
        return warm_up_launches(samples, self.gpu.capability, self._tiled)

    def _sample(self, call: AttentionCall, q: torch.Tensor) -> LayerSample:
        layer_index = self.cache.layer_indices[call.layer]
        pool, index = self.cache.pools[layer_index.group], layer_index.index
        kv = q.new_zeros(1, pool.spec.group.kv_heads, q.shape[2])
        features = _features(call, _shift(pool, index, call, q))
        cached, keys = _cached(pool, index), _stored_keys(pool, index, kv)
        return LayerSample(pool.queries(q), keys, kv, cached, features, q.dtype)

    def _pages_of(self, batch: Batch, group: int, device: torch.device) -> PassPages:
        pages = self._pages.setdefault(batch, {})
        if group not in pages:
            pages[group] = PassPages(batch, group, self.cache.block, device)
        return pages[group]


@dataclass(frozen=True, slots=True)
class _LayerPass:
    """One layer in a pass: q [T, Hq, D] in the basis of the stored keys, the `shift` of scores, and the output."""

    call: AttentionCall
    pool: KVPool
    index: int
    q: torch.Tensor
    shift: torch.Tensor | None
    out: torch.Tensor
    pages: PassPages

    def fresh(self, chunks: tuple[int, ...], attention: FreshAttention) -> None:
        prompts = self.pages.fresh(chunks)
        k, v = read_back(self.pool, self.index, self.pages.slots[prompts.rows], self.out.dtype)
        q = self.q[prompts.rows].to(self.out.dtype)
        self.out[prompts.rows] = attention.attend(self.call, q, k, v, prompts)

    def decode(self, cached: Cached, work: Division, gpu: Gpu) -> None:
        group = self.q.shape[1] // cached.kv_heads
        cut = decode_cut(gpu.capability, self.q.shape[2], group, self._wide, cached.kind)
        programs = len(work.decode) * cached.kv_heads * -(-group // cut.heads)
        visible = min(work.longest, self.call.window or self.call.chunk or work.longest)
        self._launch(cached, work.decode, 1, cut, num_splits(programs, gpu.processors, visible, cut.keys))

    def extend(self, cached: Cached, chunks: tuple[int, ...]) -> None:
        cut = extend_cut(self.q.shape[2], self.q.shape[1] // cached.kv_heads, self._wide, cached.is_mixed)
        self._launch(cached, chunks, cut.rows // cut.heads, cut)

    @property
    def _wide(self) -> bool:
        return self.out.dtype == torch.float32

    def _launch(self, cached: Cached, chunks: tuple[int, ...], tokens: int, cut: Cut, splits: int = 1) -> None:
        call, pages = self.call, self.pages.tiled(chunks, tokens)
        for launch in attend_launches(self.q, self.out, cached, pages, _features(call, self.shift), cut, splits):
            launch.run()


def store_by_kernel(pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Does what `KVPool.write` does, bit for bit, in one launch."""
    store_launch(_stored_keys(pool, layer, k), v, _cached(pool, layer), slots).run()


def _cached(pool: KVPool, layer: int) -> Cached:
    keys, values = (Side.of(*planes) for planes in pool.planes(layer))
    return Cached(keys, values, pool.spec.block)


def _stored_keys(pool: KVPool, layer: int, k: torch.Tensor) -> torch.Tensor:
    """Keys [T, H, D] in the basis in which the cache stores them."""
    return k if pool.key_transform is None else pool.key_transform.keys(layer, k)


def _features(call: AttentionCall, shift: torch.Tensor | None) -> Features:
    return Features(call.scale, call.window, call.chunk, call.softcap, call.sinks, shift)


def _shift(pool: KVPool, layer: int, call: AttentionCall, q: torch.Tensor) -> torch.Tensor | None:
    """What the subtracted key offset takes from products, [T, Hq]; None where softmax cancels it."""
    return None if pool.key_transform is None or call.is_plain else pool.key_transform.shifts(layer, q)
