"""Attention of a pass whose sequences lie in several cohorts, one of them on the device (`runtime/kv/host.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache
from ..kv.host import HostKV, TokenSlots
from .protocol import AttentionBackend, AttentionCall, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The chunks of a cohort, `batch`, whose rows in the pass are `rows`."""

    cohort: int
    rows: slice
    batch: Batch


class CohortAttention:
    """The device's cohort attends with a backend of its own, the others one after the other through windows.

    A pass has its chunks by cohort, in ascending order, so that rows of a cohort follow one another.
    """

    def __init__(self, cache: KVCache, host: HostKV, make: Callable[[KVCache], AttentionBackend]) -> None:
        """`make` gives the backend of a cache."""
        self._cache, self._host = cache, host
        self.device = make(cache)
        self._windows = make(KVCache(host.windows, sharing=False))
        self._batch: Batch | None = None
        self._parts: list[_Part] = []
        self._slots: list[TokenSlots] = []

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`."""
        if self._batch is not batch:
            self._begin(batch)
        at, results = self._cache.layer_indices[call.layer], []
        for part in self._parts:
            of_part = q[part.rows], k[part.rows], v[part.rows]
            if part.cohort == 0:
                results.append(self.device.attend(call, *of_part, part.batch))
            else:
                with self._host.window(part.cohort, at):
                    results.append(self._windows.attend(call, *of_part, part.batch))
        if self._slots:
            behind = slice(len(k) - len(self._slots[at.group].cohorts), None)
            self._host.write(at, self._slots[at.group], k[behind], v[behind])
        return results[0] if len(results) == 1 else torch.cat(results)

    def _begin(self, batch: Batch) -> None:
        by_cohort = groupby(batch.chunks, key=lambda chunk: chunk.sequence.table.cohort)
        self._parts = [_part(cohort, batch, tuple(chunks)) for cohort, chunks in by_cohort]
        hosted = [part for part in self._parts if part.cohort]
        self._slots = [self._slots_of(hosted, group) for group in range(len(self._cache.pools))] if hosted else []
        layers = [self._cache.layer_indices[layer] for layer in sorted(self._cache.layer_indices)]
        self._host.begin([part.cohort for part in hosted], layers)
        self._batch = batch

    def _slots_of(self, parts: list[_Part], group: int) -> TokenSlots:
        block = self._cache.block
        slots = torch.cat([slots_of(part.batch.chunks, group, block) for part in parts])
        cohorts = torch.cat([torch.full((part.batch.num_tokens,), part.cohort - 1) for part in parts])
        return TokenSlots(cohorts, slots // block, slots % block)


def _part(cohort: int, batch: Batch, chunks: tuple[TokenChunk, ...]) -> _Part:
    """The chunks as a batch of their own, as far as attention reads it."""
    first = chunks[0].begin
    moved = tuple(replace(chunk, begin=chunk.begin - first) for chunk in chunks)
    return _Part(cohort, slice(first, chunks[-1].end), replace(batch, chunks=moved))
