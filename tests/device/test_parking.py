"""Host memory for parked blocks (`runtime/kv/cache.py`) is pinned in pieces that no copy crosses, and given back."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from moedge.runtime.kv import cache as parking_memory
from moedge.runtime.kv.cache import ParkingMemory
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.shape.model_shape import KVGroup

SPECS = [KVSpec(KVGroup((0, 1), 2, 16, None), "fp32", 4), KVSpec(KVGroup((2,), 2, 16, 8), "int4", 4)]
COUNTS = (10, 3)


def test_a_block_lies_in_one_registration(fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = [spec.block_nbytes for spec in SPECS]
    monkeypatch.setattr(parking_memory, "PIN_CHUNK_NBYTES", 3 * nbytes[0] + 1)
    fake = fakes.FakeDevice()
    memory = ParkingMemory(SPECS, COUNTS, fake.device)
    assert [[row.numel() for row in rows] for rows in memory.slots] == [[nbytes[0]] * 10, [nbytes[1]] * 3]
    assert sum(fake.cuda.registered.values()) == 10 * nbytes[0] + 3 * nbytes[1]
    assert len(fake.cuda.registered) == 5, "three blocks of the first group at a time, all of the second"
    for row in (row for rows in memory.slots for row in rows):
        begin, end = row.data_ptr(), row.data_ptr() + row.numel()
        assert any(at <= begin < end <= at + length for at, length in fake.cuda.registered.items())
    memory.close()
    assert not fake.cuda.registered


@pytest.mark.parametrize("limit", [0, 1000])
def test_what_cannot_be_pinned_whole_is_not_pinned(limit: int, fakes: ModuleType) -> None:
    fake = fakes.FakeDevice(pin_limit=limit)
    memory = ParkingMemory(SPECS, COUNTS, fake.device)
    assert not fake.cuda.registered
    assert [len(rows) for rows in memory.slots] == list(COUNTS)
    memory.slots[0][9].fill_(7)
    memory.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_sequences_that_were_parked_go_on_as_if_nothing_had_happened(kv: str, case: Any, fakes: ModuleType) -> None:
    """A cache with room for two of four sequences at their longest, all of which are admitted: they grow into it."""
    tiny = case("qwen3_moe")
    tiny = replace(tiny, settings=replace(tiny.settings, kv=kv), lengths=(10, 11, 12, 13), new_tokens=9)
    fake = fakes.FakeDevice()
    specs = [KVSpec(group, kv, 4) for group in tiny.source.shape.kv_groups]
    blocks = tuple(2 * spec.least_blocks(tiny.job.longest) for spec in specs)
    # The smallest plan of the tiny model has one sequence in a pass: nobody would be preempted.
    ample = replace(tiny.plan(fake.device, 1.0), max_sequences=4, kv_block=4, kv_blocks=tuple(4 * n for n in blocks))
    tight = replace(ample, kv_blocks=blocks, parked_blocks=tuple(2 * count for count in blocks))
    with fake:
        wanted, recomputed, parked = (
            tiny.run(plan, fake.device) for plan in (ample, replace(tight, parked_blocks=(0,) * len(blocks)), tight)
        )
    assert wanted.parked == recomputed.parked == recomputed.pinned_for_parking == 0
    assert parked.parked > 0
    assert parked.pinned_for_parking > 0
    assert parked.tokens == recomputed.tokens == wanted.tokens
    assert recomputed.passes > wanted.passes, "nobody was preempted"
