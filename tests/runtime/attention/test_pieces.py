"""Every token meets each position that it sees exactly once; nothing unwritten is multiplied in place."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.attention.decode_plan import DENSE, Decodings, Pieces, Share, shares
from moedge.runtime.attention.pass_pages import GroupPlaces
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
        """(owner, slot of the pool) of all that is seen."""
        found = []
        for owner, (chunk, table) in enumerate(self.tables.items()):
            for position in range(call.first_visible(chunk.past), chunk.past + 1):
                found.append((owner, int(table[position // self.block]) * self.block + position % self.block))
        return sorted(found)


def met(found: list[Share], block: int) -> list[tuple[int, int]]:
    pairs = []
    for share in found:
        slots = (share.pieces.block_ids[:, :, None] * block + np.arange(block)).reshape(len(share.pieces), -1)
        hidden = share.pieces.hidden(slots.shape[1])
        for index in np.flatnonzero(share.wanted):
            seen = slots[index] if hidden is None else slots[index][~hidden[index]]
            pairs += [(int(share.pieces.owners[index]), slot) for slot in seen.tolist()]
    return sorted(pairs)


@given(pasts, blocks, windows, st.integers(0, 30), st.integers(0, 3), st.integers(1, 16))
def test_every_position_is_met_once(
    past: list[int], block: int, window: int | None, idle: int, shared: int, most: int
) -> None:
    pool, call = Pool(past, block, idle, shared, most), AttentionCall(0, 1.0, window)
    pieces = pool.pieces(call)
    tokens = pieces.block_ids.shape[1] * block
    found = list(shares(pieces, tokens, pool.num_blocks, most))
    assert met(found, block) == pool.wanted(call)
    for share in found:
        assert 0 < len(share.pieces) <= most
        if share.begin is not None:
            assert share.pieces.hidden(tokens) is None
            assert share.pieces.block_ids[:, 0].tolist() == list(range(share.begin, share.begin + len(share.pieces)))
            assert share.wanted.mean() >= DENSE


def test_a_full_pool_is_multiplied_in_place() -> None:
    pool, call = Pool([1023] * 16, 32, 0, 0, 0), AttentionCall(0, 1.0)
    assert all(share.begin is not None for share in shares(pool.pieces(call), 32, pool.num_blocks, 64))
    pool = Pool([1023] * 16, 32, 3000, 0, 0)
    assert all(share.begin is None for share in shares(pool.pieces(call), 32, pool.num_blocks, 64))


@given(pasts, blocks, st.integers(0, 30))
def test_sums_name_every_wanted_place_of_a_sequence(past: list[int], block: int, idle: int) -> None:
    pool, call = Pool(past, block, idle, 0, 1), AttentionCall(0, 1.0)
    spec = SimpleNamespace(block=block, group=SimpleNamespace(kv_heads=KV_HEADS, head_dim=DIM))
    cache = SimpleNamespace(pools=[SimpleNamespace(spec=spec, memory=range(pool.num_blocks))])
    nothing = torch.empty(0)
    decodings = Decodings(cast("KVCache", cache), 2, 2, "cpu")
    found = decodings.of(call, 0, GroupPlaces(nothing, nothing, nothing, pool.tables), HEADS)
    assert decodings.of(call, 0, GroupPlaces(nothing, nothing, nothing, pool.tables), HEADS) is not found
    counted = np.zeros(len(past), dtype=np.int64)
    for sweep in found.sweeps:
        sums = sweep.sums
        owners = torch.cat([job.owners for job in sweep.jobs])
        assert torch.equal(owners[sums.places], sums.owners)
        assert len(sums.places.unique()) == len(sums.places)
        ends = torch.cat([sums.bounds[1:], torch.tensor([len(sums.lanes)], dtype=torch.int32)])
        for owner in range(len(past)):
            for head in (0, HEADS - 1):
                bag = slice(int(sums.bounds[owner * HEADS + head]), int(ends[owner * HEADS + head]))
                places = sums.places[sums.owners == owner]
                assert torch.equal(sums.lanes[bag].long(), places * HEADS + head)
            counted[owner] += len(places)
    joined = -(-32 // block)
    assert counted.tolist() == [-(-(tokens // block + 1) // joined) for tokens in past]
