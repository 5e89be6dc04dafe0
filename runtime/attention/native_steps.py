"""Attention of a pass of generated tokens as steps of the library, which a layer's other steps run with."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof

import numpy as np
import torch

from ...quant.native.interface import NativeAttention, NativeAttentionStep
from ..engine.batch import Batch
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from .native_rows import RowAttention, RowPlan, RowQuery, Wave, arguments_of, stored
from .protocol import AttentionCall, check_reach

# Items that every thread takes at most, so that all end at about the same time.
_TURNS = 8


class AttentionSteps:
    """The arguments of two steps for every layer, ATTEND and REDUCE, and where a pass stores keys and values.

    Keys and values are bfloat16 in the cache. All layers read the queries q [T, Hq, D] and write out [T, Hq, D], in
    memory that stays; `begin` sets what changes from pass to pass.
    """

    def __init__(
        self,
        rows: RowAttention,
        cache: KVCache,
        calls: Sequence[AttentionCall],
        q: torch.Tensor,
        out: torch.Tensor,
        threads: int,
    ) -> None:
        self._rows, self._cache, self._calls, self._threads = rows, cache, calls, threads
        self._q, self._out = q, out
        self._arguments: list[NativeAttention] = []
        # Tensors that live as long as this, and those of the running pass.
        self._forever: list[torch.Tensor] = []
        self._kept: list[object] = []
        self._waves: dict[int, tuple[RowPlan, Wave]] = {}
        self.attend, self.reduce = ([NativeAttentionStep() for _ in calls] for _ in range(2))
        self._groups = [cache.layer_indices[call.layer].group for call in calls]
        for call, group in zip(calls, self._groups, strict=True):
            check_reach(call, cache.pools[group].spec.group)

    def codes(self, index: int) -> tuple[int, int]:
        """The addresses of keys and values in the cache, [blocks, H, block, D], of the index-th layer."""
        where = self._cache.layer_indices[self._calls[index].layer]
        keys, values = self._cache.pools[where.group].planes(where.index)
        return keys.codes.data_ptr(), values.codes.data_ptr()

    @property
    def block(self) -> int:
        return self._cache.block

    def begin(self, batch: Batch) -> list[int] | None:
        """Gets ready for a pass; the addresses of its slots int64 [T], by layer. None if it has other rows."""
        if len(batch.chunks) != batch.num_tokens:
            return None
        self._waves, slots = {}, {}
        for call, group in zip(self._calls, self._groups, strict=True):
            if group in self._waves:
                continue
            plan = self._rows.plan(call, batch, group)
            assert plan is not None
            waves = list(plan.waves(self._q.shape[1] // plan.kv_heads, self._threads))
            if len(waves) > 1:
                return None
            self._waves[group], slots[group] = (plan, waves[0]), self._slots(batch, group)
        self._kept = list(slots.values())
        memory = None
        # Memory that one layer makes grow is at another address for those before it.
        while memory != self._rows.memory:
            memory = self._rows.memory
            for index in range(len(self._calls)):
                self._point(index)
        return [slots[group].ctypes.data for group in self._groups]

    def _slots(self, batch: Batch, group: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        block = self._cache.block
        tables = (chunk.sequence.table.blocks[group] for chunk in batch.chunks)
        return np.array(
            [
                table[chunk.past // block] * block + chunk.past % block
                for chunk, table in zip(batch.chunks, tables, strict=True)
            ],
            np.int64,
        )

    def _point(self, index: int) -> None:
        """Sets what the index-th layer reads of the pass."""
        plan, wave = self._waves[self._groups[index]]
        if index == len(self._arguments):
            self._arguments.append(self._make(index, plan))
        arguments = self._arguments[index]
        arguments.tables, arguments.table_width = plan.tables.ctypes.data, plan.tables.shape[1]
        base, nbytes = self._rows.point(arguments, wave, self._threads)
        items = wave.num_items * plan.kv_heads
        reduced = 0 if wave.pieces is None else len(wave.runs) * plan.kv_heads
        at_once = max(1, items // (self._threads * _TURNS))
        for step, count, many in ((self.attend[index], items, at_once), (self.reduce[index], reduced, 1)):
            step.attention, step.items, step.at_once = addressof(arguments), count, many
            step.scratch, step.thread_nbytes = base, nbytes

    def _make(self, index: int, plan: RowPlan) -> NativeAttention:
        call = self._calls[index]
        where = self._cache.layer_indices[call.layer]
        pool = self._cache.pools[where.group]
        keys, values = stored(pool, where.index)
        arguments, kept = arguments_of(RowQuery(call, self._q), [keys], values, plan, self._out)
        arguments.exact, arguments.block = False, self._cache.block
        # The sinks, in float32.
        self._forever += kept
        return arguments


def stores_plainly(pool: KVPool) -> bool:
    """Whether keys and values are in the cache as they are in bfloat16."""
    planes = [side.codes for side in pool.planes(0)]
    plain = pool.key_transform is None and not pool.quantized and not pool.spec.group.is_latent
    return plain and all(codes.dtype == torch.bfloat16 and codes.is_contiguous() for codes in planes)
