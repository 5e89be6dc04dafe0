"""Attention of whole prompts over themselves on a GPU: torch's ragged flash attention, else prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from ...quant.kv.codec import Coded, decode
from ..kv.pool import KVPool
from .dense import attend_fresh
from .pass_pages import Fresh
from .protocol import AttentionCall

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
    def for_gpu(cls, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> FreshAttention:
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
