"""Every token attends to each of its positions exactly once; no unwritten bytes are multiplied in place."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.attention.decode_plan import DENSE, DecodePlanCache, Pieces, Tile, tiles
from moedge.runtime.attention.pass_pages import GroupSlots
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.engine.batch import Chunk
from moedge.runtime.kv.cache import KVCache

HEADS, KV_HEADS, DIM = 8, 4, 128
pasts = st.lists(st.integers(0, 700), min_size=1, max_size=40)
blocks = st.sampled_from([4, 16, 32, 64])
windows = st.sampled_from([None, 40, 512])


class Pool:
    """Sequences' tables in a pool in which some blocks are nobody's, and which some share with the first."""

    def __init__(self, past: list[int], block: int, idle: int, shared: int, seed: int) -> None:
        self.block = block
        counts = [tokens // block + 1 for tokens in past]
        self.num_blocks = sum(counts) + idle
        ids = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables: dict[Chunk, torch.Tensor] = {}
        for row, (tokens, table) in enumerate(zip(past, torch.split(ids[: sum(counts)], counts), strict=True)):
            chunk = Chunk(cast("object", None), row, tokens, 1, True)  # type: ignore[arg-type]
            first = next(iter(self.tables.values()), table)
            common = min(shared, len(first), len(table))
            self.tables[chunk] = torch.cat([first[:common], table[common:]])

    def pieces(self, call: AttentionCall) -> Pieces:
        return Pieces.of(call, self.tables, self.block)

    def wanted(self, call: AttentionCall) -> list[tuple[int, int]]:
        """(owner, slot of the pool) of every visible position."""
        found = []
        for owner, (chunk, table) in enumerate(self.tables.items()):
            for position in range(call.first_visible(chunk.past), chunk.past + 1):
                found.append((owner, int(table[position // self.block]) * self.block + position % self.block))
        return sorted(found)


def met(found: list[Tile], block: int) -> list[tuple[int, int]]:
    pairs = []
    for tile in found:
        slots = (tile.pieces.block_ids[:, :, None] * block + np.arange(block)).reshape(len(tile.pieces), -1)
        hidden = tile.pieces.hidden(slots.shape[1])
        for index in np.flatnonzero(tile.wanted):
            visible = slots[index] if hidden is None else slots[index][~hidden[index]]
            pairs += [(int(tile.pieces.owners[index]), slot) for slot in visible.tolist()]
    return sorted(pairs)


@given(pasts, blocks, windows, st.integers(0, 30), st.integers(0, 3), st.integers(1, 16))
def test_every_position_is_met_once(
    past: list[int], block: int, window: int | None, idle: int, shared: int, most: int
) -> None:
    pool, call = Pool(past, block, idle, shared, most), AttentionCall(0, 1.0, window)
    pieces = pool.pieces(call)
    tokens = pieces.block_ids.shape[1] * block
    found = list(tiles(pieces, tokens, pool.num_blocks, most))
    assert met(found, block) == pool.wanted(call)
    for tile in found:
        assert 0 < len(tile.pieces) <= most
        if tile.begin is not None:
            assert tile.pieces.hidden(tokens) is None
            assert tile.pieces.block_ids[:, 0].tolist() == list(range(tile.begin, tile.begin + len(tile.pieces)))
            assert tile.wanted.mean() >= DENSE


def test_a_full_pool_is_multiplied_in_place() -> None:
    pool, call = Pool([1023] * 16, 32, 0, 0, 0), AttentionCall(0, 1.0)
    assert all(tile.begin is not None for tile in tiles(pool.pieces(call), 32, pool.num_blocks, 64))
    pool = Pool([1023] * 16, 32, 3000, 0, 0)
    assert all(tile.begin is None for tile in tiles(pool.pieces(call), 32, pool.num_blocks, 64))


@given(pasts, blocks, st.integers(0, 30))
def test_reductions_name_every_wanted_row_of_a_sequence(past: list[int], block: int, idle: int) -> None:
    pool, call = Pool(past, block, idle, 0, 1), AttentionCall(0, 1.0)
    spec = SimpleNamespace(block=block, group=SimpleNamespace(kv_heads=KV_HEADS, head_dim=DIM))
    cache = SimpleNamespace(pools=[SimpleNamespace(spec=spec, memory=range(pool.num_blocks))])
    nothing = torch.empty(0)
    plans = DecodePlanCache(cast("KVCache", cache), 2, 2, "cpu")
    found = plans.of(call, 0, GroupSlots(nothing, nothing, nothing, pool.tables), HEADS)
    assert plans.of(call, 0, GroupSlots(nothing, nothing, nothing, pool.tables), HEADS) is not found
    counted = np.zeros(len(past), dtype=np.int64)
    for wave in found.waves:
        reduction = wave.reduction
        owners = torch.cat([task.owners for task in wave.tasks])
        assert torch.equal(owners[reduction.rows], reduction.owners)
        assert len(reduction.rows.unique()) == len(reduction.rows)
        ends = torch.cat([reduction.offsets[1:], torch.tensor([len(reduction.head_rows)], dtype=torch.int32)])
        for owner in range(len(past)):
            for head in (0, HEADS - 1):
                bag = slice(int(reduction.offsets[owner * HEADS + head]), int(ends[owner * HEADS + head]))
                rows = reduction.rows[reduction.owners == owner]
                assert torch.equal(reduction.head_rows[bag].long(), rows * HEADS + head)
            counted[owner] += len(rows)
    joined = -(-32 // block)
    assert counted.tolist() == [-(-(tokens // block + 1) // joined) for tokens in past]
