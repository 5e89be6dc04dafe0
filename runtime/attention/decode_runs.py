"""Sequences whose one new token is computed together: as many as fit a core's cache, with about as many blocks each.

For short sequences the calls of Python and torch cost more than the bytes: one by one, 128 sequences of 40 tokens spent
a quarter of a pass in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..batch import Chunk
from ..kv.cache import KVCache
from ..kv.spec import KVSpec
from .limits import WIDE_NUMEL
from .places import GroupPlaces
from .protocol import AttentionCall


@dataclass(frozen=True, slots=True)
class BlockRun:
    """B blocks of each of n sequences, L = B * block positions: `block_ids` [n, B].

    `hidden` [n, 1, L] marks the positions that their tokens do not see, `blank` their places among all n * L; both None
    where every position is seen.
    """

    block_ids: torch.Tensor
    hidden: torch.Tensor | None
    blank: torch.Tensor | None

    @classmethod
    def of(cls, block_ids: torch.Tensor, hidden: torch.Tensor) -> BlockRun:
        if not hidden.any():
            return cls(block_ids, None, None)
        return cls(block_ids, hidden.unsqueeze(1), hidden.flatten().nonzero().squeeze(-1))


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Rows [n] of a pass and what their tokens see: `whole`, and the same in `pieces` of at most WIDE_NUMEL elements.

    More than one piece only where a single sequence has more.
    """

    rows: torch.Tensor
    whole: BlockRun
    pieces: tuple[BlockRun, ...]


class DecodeRuns:
    """The runs of the pass that is running, by layer group: the same for all layers of a group."""

    def __init__(self, cache: KVCache, sharers: int) -> None:
        """At least `sharers` runs are made of as many sequences, unless one piece has room for all of them."""
        self._cache = cache
        self._sharers = sharers
        self._found: dict[int, tuple[GroupPlaces, list[DecodeRun]]] = {}

    def of(self, call: AttentionCall, group: int, places: GroupPlaces) -> list[DecodeRun]:
        if group not in self._found or self._found[group][0] is not places:
            self._found[group] = places, list(self._make(call, self._cache.pools[group].spec, places))
        return self._found[group][1]

    def _make(self, call: AttentionCall, spec: KVSpec, places: GroupPlaces) -> Iterator[DecodeRun]:
        block = spec.block
        seen = [_Seen.of(call, chunk, table, block) for chunk, table in places.tables.items() if chunk.count == 1]
        seen.sort(key=lambda one: len(one.block_ids))
        blocks = max(1, WIDE_NUMEL // (spec.group.kv_heads * block * spec.group.head_dim))
        # So little is computed before another thread has woken up.
        little = len(seen) * max((len(one.block_ids) for one in seen), default=0) <= blocks
        most = len(seen) if little else -(-len(seen) // self._sharers)
        together: list[_Seen] = []
        for one in seen:
            if together and not _fits(together, one, most, blocks):
                yield _run(together, block, blocks)
                together = []
            together.append(one)
        if together:
            yield _run(together, block, blocks)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one sequence: its row, its blocks from the first visible one on, and the visible positions in them."""

    row: int
    block_ids: torch.Tensor
    low: int
    high: int

    @classmethod
    def of(cls, call: AttentionCall, chunk: Chunk, table: torch.Tensor, block: int) -> _Seen:
        low, high = call.first_seen(chunk.past), chunk.past + 1
        first = low // block
        return cls(chunk.begin, table[first : -(-high // block)], low - first * block, high - first * block)


def _fits(together: list[_Seen], one: _Seen, most: int, blocks: int) -> bool:
    """`one` has the most blocks; the others are filled up to as many, by a quarter at most."""
    shortest, longest = len(together[0].block_ids), len(one.block_ids)
    few = len(together) < most and (len(together) + 1) * longest <= blocks
    return few and longest <= shortest + shortest // 4 + 1


def _run(together: list[_Seen], block: int, blocks: int) -> DecodeRun:
    """Sequences with fewer blocks than the longest get their first one again, unseen."""
    longest = len(together[-1].block_ids)
    device = together[-1].block_ids.device
    block_ids = torch.stack(
        [torch.cat([one.block_ids, one.block_ids[:1].expand(longest - len(one.block_ids))]) for one in together]
    )
    positions = torch.arange(longest * block)
    low, high = (torch.tensor([[getattr(one, end)] for one in together]) for end in ("low", "high"))
    hidden = ((positions < low) | (positions >= high)).to(device)
    pieces = zip(torch.split(block_ids, blocks, 1), torch.split(hidden, blocks * block, 1), strict=True)
    rows = torch.tensor([one.row for one in together], device=device)
    return DecodeRun(rows, BlockRun.of(block_ids, hidden), tuple(BlockRun.of(*piece) for piece in pieces))
