"""Attention of a pass whose sequences lie in several cohorts, one of them on the device (`runtime/kv/host.py`).

Cohorts in host memory cross the link to be attended to. Or the CPU attends to them where they lie: queries of
generated tokens go down and results up, a hundredth of the bytes or less. Prompts are the device's then, too: of one
that begins in the pass nothing is in the cohort yet, and only what has a past crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch

from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache
from ..kv.host import HostKV, TokenSlots
from .protocol import AttentionBackend, AttentionCall, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Chunks of a cohort, `batch`, whose rows in the pass are `rows`; `here`: the CPU attends to them."""

    cohort: int
    rows: slice
    batch: Batch
    here: bool
    crosses: bool


class CohortAttention:
    """The device's cohort attends with a backend of its own, the others one after the other through windows, or on the
    CPU.

    A pass has its chunks by cohort, in ascending order, so that rows of a cohort follow one another.
    """

    def __init__(
        self,
        cache: KVCache,
        host: HostKV,
        make: Callable[[KVCache], AttentionBackend],
        here: AttentionBackend | None = None,
        mtp: bool = False,
    ) -> None:
        """`make` gives the backend of a cache; `here` is the CPU's, over `HostKV.here`, which stores nothing: None
        where the device attends to all cohorts. With `mtp` the last layer is a head, which has batches of its own."""
        self._cache, self._host, self._here = cache, host, here
        self.device = make(cache)
        self._windows = make(KVCache(host.windows, sharing=False))
        self._batch: Batch | None = None
        self._parts: list[_Part] = []
        self._slots: list[TokenSlots] = []
        layers = sorted(cache.layer_indices)
        self._layers, self._head = layers[: len(layers) - mtp], layers[len(layers) - mtp :]
        # The rows of a pass to which the CPU attends, and where they are in its queries, by part.
        self._rows: torch.Tensor | None = None

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`."""
        if self._batch is not batch:
            self._begin(batch, q.device, self._head if call.layer in self._head else self._layers)
        at, results = self._cache.layer_indices[call.layer], {}
        for index, part in enumerate(self._parts):
            of_part = q[part.rows], k[part.rows], v[part.rows]
            if part.cohort == 0:
                results[index] = self.device.attend(call, *of_part, part.batch)
            elif not part.here:
                with self._host.window(part.cohort, at) if part.crosses else self._host.empty_window(at):
                    results[index] = self._windows.attend(call, *of_part, part.batch)
        if self._slots:
            behind = slice(len(k) - len(self._slots[at.group].cohorts), None)
            self._host.write(at, self._slots[at.group], k[behind], v[behind])
        if self._rows is not None:
            results |= self._attend_here(call, q, self._rows)
        return results[0] if len(results) == 1 else torch.cat([results[index] for index in range(len(results))])

    def _attend_here(self, call: AttentionCall, q: torch.Tensor, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """The results of parts of the CPU, by their number; it begins when their new tokens are stored."""
        here = [(index, part) for index, part in enumerate(self._parts) if part.here]
        ends = list(accumulate(part.batch.num_tokens for _, part in here))
        at, backend = self._cache.layer_indices[call.layer], self._here
        assert backend is not None
        own = call if call.sinks is None else replace(call, sinks=call.sinks.cpu())

        def attended(queries: torch.Tensor) -> torch.Tensor:
            found = []
            for (_, part), end in zip(here, ends, strict=True):
                mine = queries[end - part.batch.num_tokens : end]
                self._host.bind_here(part.cohort, at)
                found.append(backend.attend(own, mine, mine, mine, part.batch))
            return torch.cat(found)

        found = self._host.attend_here(q, rows, attended)
        return {index: found[end - part.batch.num_tokens : end] for (index, part), end in zip(here, ends, strict=True)}

    def _begin(self, batch: Batch, device: torch.device, layers: list[int]) -> None:
        by_part = groupby(batch.chunks, key=self._part_of)
        self._parts = [_part(*key, batch, tuple(chunks)) for key, chunks in by_part]
        hosted = [part for part in self._parts if part.cohort]
        self._slots = [self._slots_of(hosted, group) for group in range(len(self._cache.pools))] if hosted else []
        order = [self._cache.layer_indices[layer] for layer in layers]
        self._host.begin([part.cohort for part in hosted if part.crosses], order)
        rows = [torch.arange(part.rows.start, part.rows.stop) for part in hosted if part.here]
        self._rows = torch.cat(rows).to(device) if rows else None
        self._batch = batch

    def _part_of(self, chunk: TokenChunk) -> tuple[int, bool, bool]:
        """The cohort of a chunk, whether the CPU attends to it, and whether its cohort crosses the link."""
        cohort = chunk.sequence.table.cohort
        here = cohort > 0 and self._here is not None and chunk.decodes
        return cohort, here, cohort > 0 and not here and (self._here is None or chunk.past > 0)

    def _slots_of(self, parts: list[_Part], group: int) -> TokenSlots:
        block = self._cache.block
        slots = torch.cat([slots_of(part.batch.chunks, group, block) for part in parts])
        cohorts = torch.cat([torch.full((part.batch.num_tokens,), part.cohort - 1) for part in parts])
        return TokenSlots(cohorts, slots // block, slots % block)


def _part(cohort: int, here: bool, crosses: bool, batch: Batch, chunks: tuple[TokenChunk, ...]) -> _Part:
    """The chunks as a batch of their own, as far as attention reads it."""
    first = chunks[0].begin
    moved = tuple(replace(chunk, begin=chunk.begin - first) for chunk in chunks)
    return _Part(cohort, slice(first, chunks[-1].end), replace(batch, chunks=moved), here, crosses)
