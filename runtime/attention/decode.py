"""Attention of generated tokens in torch: keys and values of several sequences are gathered and attended to at once.

For machines on which neither the library of CPU kernels nor Triton computes, and for latents on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..engine.batch import Chunk
from ..kv.allocator import NO_BLOCK
from ..kv.cache import KVCache
from .choice import GATHERED_NUMEL
from .pass_pages import GroupSlots
from .protocol import AttentionCall, decodes


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRun:
    """Chunks of one token, `rows` int64 [S] of the pass, whose keys are gathered together: L positions for each.

    `block_ids` [S * m] are those of all chunks, one after the other. `mask` [S, L] is -inf where a token does not
    attend to a position, else 0; `blank` are the numbers of the former in [S * L], whose bytes may be NaN.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor
    blank: torch.Tensor


class DecodeRuns:
    """The runs of the running pass by layer group, which its layers share."""

    def __init__(self, cache: KVCache, dtype: torch.dtype, device: torch.device | str) -> None:
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._runs: dict[int, tuple[GroupSlots, list[DecodeRun]]] = {}

    def of(self, call: AttentionCall, group: int, slots: GroupSlots) -> list[DecodeRun]:
        """The runs of chunks that decode."""
        if group not in self._runs or self._runs[group][0] is not slots:
            chunks = [chunk for chunk in slots.tables if decodes(call, chunk)]
            self._runs[group] = slots, [self._run(call, group, some) for some in self._split(call, group, chunks)]
        return self._runs[group][1]

    def _split(self, call: AttentionCall, group: int, chunks: list[Chunk]) -> Iterator[list[Chunk]]:
        """Runs of chunks, longest pasts first, of at most GATHERED_NUMEL elements of keys, or of one chunk."""
        spec = self._cache.pools[group].spec
        chunks = sorted(chunks, key=lambda chunk: call.first_visible(chunk.past) - chunk.past)
        while chunks:
            tokens = len(self._blocks(call, group, chunks[0])) * spec.block
            count = max(1, GATHERED_NUMEL // (tokens * spec.group.kv_heads * spec.group.head_dim))
            yield chunks[:count]
            chunks = chunks[count:]

    def _blocks(self, call: AttentionCall, group: int, chunk: Chunk) -> list[int]:
        block = self._cache.block
        table = chunk.sequence.table.blocks[group]
        return table[call.first_visible(chunk.past) // block : chunk.past // block + 1]

    def _run(self, call: AttentionCall, group: int, chunks: list[Chunk]) -> DecodeRun:
        block, tables = self._cache.block, [self._blocks(call, group, chunk) for chunk in chunks]
        most = max(map(len, tables))
        # Whatever block fills up a table is hidden.
        padded = torch.tensor([table + [NO_BLOCK] * (most - len(table)) for table in tables]).clamp_(min=0)
        pasts = torch.tensor([chunk.past for chunk in chunks]).unsqueeze(1)
        firsts = torch.tensor([call.first_visible(chunk.past) for chunk in chunks]).unsqueeze(1)
        positions = firsts // block * block + torch.arange(most * block)
        hidden = (positions < firsts) | (positions > pasts)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        rows = torch.tensor([chunk.begin for chunk in chunks])
        numbers = (rows, padded.flatten(), mask, hidden.flatten().nonzero().flatten())
        return DecodeRun(*(each.to(self._device) for each in numbers))
