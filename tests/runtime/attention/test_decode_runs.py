"""Every sequence is in one run, which fits its room, and fills up no sequence by much."""

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.attention.decode_runs import DecodeRun, DecodeRuns
from moedge.runtime.attention.limits import WIDE_NUMEL
from moedge.runtime.attention.places import GroupPlaces
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.batch import Chunk
from moedge.runtime.kv.cache import KVCache

BLOCK, KV_HEADS, HEAD_DIM = 16, 4, 128
ROOM = WIDE_NUMEL // (BLOCK * KV_HEADS * HEAD_DIM)
pasts = st.lists(st.integers(0, 3000), min_size=1, max_size=80)


def runs_of(past_tokens: list[int], call: AttentionCall, sharers: int) -> list[DecodeRun]:
    tables, next_id = {}, 0
    for row, past in enumerate(past_tokens):
        count = past // BLOCK + 1
        tables[Chunk(cast("object", None), row, past, 1, True)] = torch.arange(next_id, next_id + count)  # type: ignore[arg-type]
        next_id += count
    spec = SimpleNamespace(block=BLOCK, group=SimpleNamespace(kv_heads=KV_HEADS, head_dim=HEAD_DIM))
    cache = cast("KVCache", SimpleNamespace(pools=[SimpleNamespace(spec=spec)]))
    nothing = torch.empty(0)
    return DecodeRuns(cache, sharers).of(call, 0, GroupPlaces(nothing, nothing, tables))


def seen_by(run: DecodeRun, row: int) -> list[int]:
    """Global slots that the `row`-th sequence of a run sees."""
    slots = (run.whole.block_ids[row].unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()
    return slots.tolist() if run.whole.hidden is None else slots[~run.whole.hidden[row, 0]].tolist()


@given(pasts, st.sampled_from([None, 40, 512]), st.integers(1, 4))
def test_every_sequence_sees_exactly_its_positions(past: list[int], window: int | None, sharers: int) -> None:
    call = AttentionCall(0, 1.0, window)
    found = {}
    for run in runs_of(past, call, sharers):
        for index, row in enumerate(run.rows.tolist()):
            assert row not in found
            found[row] = seen_by(run, index)
    first_slot = 0
    for row, tokens in enumerate(past):
        assert found[row] == [first_slot + at for at in range(call.first_seen(tokens), tokens + 1)]
        first_slot += (tokens // BLOCK + 1) * BLOCK


@given(pasts, st.integers(1, 4))
def test_runs_fit_their_room_and_leave_work_for_all(past: list[int], sharers: int) -> None:
    runs = runs_of(past, AttentionCall(0, 1.0), sharers)
    little = len(past) * (max(past) // BLOCK + 1) <= ROOM
    assert len(runs) >= (1 if little else min(sharers, len(past)))
    for run in runs:
        count, blocks = run.whole.block_ids.shape
        assert count == 1 or count * blocks <= ROOM
        assert all(piece.block_ids.numel() <= max(ROOM, 1) for piece in run.pieces)
        shortest = min(past[row] // BLOCK + 1 for row in run.rows.tolist())
        assert blocks <= shortest + shortest // 4 + 1
        assert torch.equal(torch.cat([piece.block_ids for piece in run.pieces], 1), run.whole.block_ids)


def test_short_sequences_are_computed_together() -> None:
    assert len(runs_of([40] * 128, AttentionCall(0, 1.0), 2)) <= 128 // (ROOM // 3) + 2
