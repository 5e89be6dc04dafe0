"""Where a pass's tokens lie in the cache, as tensors that kernels read: slots, block tables, tiles of rows."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import NamedTuple

import torch

from ...quant.kernels.upload import upload
from ..batch import Batch, Chunk
from .kernels.operands import Pages
from .places import slots_of
from .protocol import AttentionCall, sees_itself_only


class Division(NamedTuple):
    """The chunks of a pass, by place in the batch, by what computes them: prompts without a past, single tokens, and
    the rest.
    """

    fresh: tuple[int, ...]
    decode: tuple[int, ...]
    extend: tuple[int, ...]


class Fresh(NamedTuple):
    """Rows of the pass that whole prompts have, one prompt behind the other: row numbers [n], bounds int32 [B + 1]."""

    rows: torch.Tensor
    bounds: torch.Tensor
    counts: list[int]


class PassPages:
    """One layer group's part of a pass, made once and used by all its layers.

    `slots` int64 [T]: block id * block + place of every token; `table` int32 [B, max blocks], padded with -1.
    Chunks are named by their place in the batch, which is their row of the table.
    """

    def __init__(self, batch: Batch, group: int, block: int, device: torch.device) -> None:
        tables = [torch.tensor(chunk.sequence.table.blocks[group], dtype=torch.int32) for chunk in batch.chunks]
        self.chunks = batch.chunks
        self.device = device
        self.slots = upload(slots_of(batch.chunks, tables, block), device)
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
        self.table = upload(padded, device)
        self._divisions: dict[object, Division] = {}
        self._tiled: dict[object, Pages] = {}
        self._fresh: dict[object, Fresh] = {}

    def divide(self, call: AttentionCall, tiled: bool) -> Division:
        """What of the pass is computed how for such a call; where `tiled`, everything as `extend`."""
        kind = (call.window, call.chunk, call.is_plain)
        if kind not in self._divisions:
            parts: dict[str, list[int]] = {name: [] for name in Division._fields}
            for index, chunk in enumerate(self.chunks):
                parts[_way(call, chunk, tiled)].append(index)
            self._divisions[kind] = Division(*map(tuple, parts.values()))
        return self._divisions[kind]

    def tiled(self, chunks: tuple[int, ...], tokens: int) -> Pages:
        """Tiles of `tokens` rows that cover the chunks.

        They start at multiples of `tokens` in the sequence, so that a row's place in its tile does not depend on the
        chunk that it came in.
        """
        key = (tokens, chunks)
        if key not in self._tiled:
            tiles = torch.tensor([tile for index in chunks for tile in self._tiles(index, tokens)], dtype=torch.int32)
            self._tiled[key] = Pages(self.table, upload(tiles, self.device))
        return self._tiled[key]

    def fresh(self, chunks: tuple[int, ...]) -> Fresh:
        if chunks not in self._fresh:
            chosen = [self.chunks[index] for index in chunks]
            rows = chain.from_iterable(range(chunk.begin, chunk.end) for chunk in chosen)
            counts = [chunk.count for chunk in chosen]
            bounds = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
            numbers = torch.tensor(list(rows))
            self._fresh[chunks] = Fresh(upload(numbers, self.device), upload(bounds, self.device), counts)
        return self._fresh[chunks]

    def longest(self, chunks: tuple[int, ...]) -> int:
        """Tokens of the longest of their sequences."""
        return max(self.chunks[index].past + self.chunks[index].count for index in chunks)

    def _tiles(self, index: int, tokens: int) -> list[tuple[int, int, int, int, int]]:
        chunk = self.chunks[index]
        begin, end = chunk.past, chunk.past + chunk.count
        starts = range(begin // tokens * tokens, end, tokens)
        row = index * self.table.shape[1]
        return [(row, chunk.begin - chunk.past, first, begin, end) for first in starts]


def _way(call: AttentionCall, chunk: Chunk, tiled: bool) -> str:
    if tiled:
        return "extend"
    if chunk.count == 1:
        return "decode"
    return "fresh" if sees_itself_only(call, chunk) else "extend"
