"""The pool of recurrent states: its bytes are those of the plan, and a table has a slot as long as it has blocks."""

from dataclasses import asdict

import pytest
import torch

from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.kv.allocator import NO_SLOT, BlockTable
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec, StateSpec
from moedge.runtime.kv.states import StatePool
from moedge.runtime.plan.candidate import CacheSize, Candidate, WeightFootprint
from moedge.runtime.plan.memory_ledger import KV_CACHE, STATES, MemoryLedger
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.model_shape import KVGroup, StateGroup, shape_from_json
from support.known_shapes import known_shape

GIB = 1 << 30
GROUPS = (StateGroup((0, 2), (6, 3), (2, 4, 5)), StateGroup((3,), (8, 2)))


def cache_of(slots: int, blocks: int = 8) -> KVCache:
    pool = KVPool(KVSpec(KVGroup((1,), 1, 2, None), "fp32", 4), blocks)
    return KVCache([pool], states=StatePool(StateSpec(GROUPS, "bf16"), slots))


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("fp32", 4)])
def test_bytes_are_those_of_the_spec(dtype: str, item: int) -> None:
    spec = StateSpec(GROUPS, dtype)
    assert spec.nbytes == 2 * (18 * item + 40 * 4) + 16 * item
    assert spec.largest_nbytes == 18 * item + 40 * 4
    pool = StatePool(spec, 5)
    assert pool.nbytes == 5 * spec.nbytes
    assert pool.conv(2).shape == (5, 6, 3)
    assert pool.recurrent(0).shape == (5, 2, 4, 5)
    assert pool.recurrent(0).dtype == torch.float32
    assert pool.conv(3).shape == (5, 8, 2)
    with pytest.raises(KeyError):
        pool.recurrent(3)


def test_a_published_model_s_bytes() -> None:
    """36 layers with 3 inputs of 8,192 channels and 32 matrices of 128 by 128: 73.7 MiB however long the text is."""
    shape = known_shape("Qwen3-Next-80B-A3B")
    assert shape.parameters == pytest.approx(80e9, rel=0.01)
    assert StateSpec(shape.state_groups, "bf16").nbytes == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    (group,) = shape.kv_groups
    assert len(group.layers) == 12
    assert shape_from_json(asdict(shape)) == shape


def test_sequences_are_weighed_by_their_states() -> None:
    shape = known_shape("Qwen3-Next-80B-A3B")
    nbytes = StateSpec(shape.state_groups, "bf16").nbytes
    weights = WeightFootprint(shape, "nf4", "bf16", False, MemoryBudget(0))
    specs = tuple(KVSpec(group, "bf16") for group in shape.kv_groups)
    one, many = (Candidate(weights, CacheSize(specs, 768, 2048), live) for live in (1, 32))
    assert (one.states, many.states) == (nbytes, (32 + 4) * nbytes), "one snapshot for every eight sequences"
    assert many.fixed - one.fixed >= 35 * nbytes
    found = []
    for ram in (10, 14, 20):
        plan = make_plan(shape, Settings(quant="nf4", kv="bf16"), MemoryBudget(ram * GIB), Workload(2000, 768))
        assert plan.states_nbytes == (plan.max_sequences + -(-plan.max_sequences // 8)) * nbytes
        assert plan.used_nbytes <= ram * GIB
        assert not any("prefixes are not shared" in note for note in plan.notes)
        found.append(plan.max_sequences)
    assert found == sorted(set(found)), "more memory, more sequences"


def test_the_ledger_lists_states_where_there_are_any() -> None:
    for name, has in (("Qwen3-Next-80B-A3B", True), ("Qwen3-30B-A3B", False)):
        shape = known_shape(name)
        plan = make_plan(shape, Settings(quant="nf4"), MemoryBudget(24 * GIB), Workload(100, 768))
        arenas = MemoryLedger.of(plan, shape).computing.arenas
        assert (STATES in arenas) == has
        assert sum(arena.planned for arena in arenas.values()) == plan.used_nbytes
        assert arenas[KV_CACHE].planned == plan.kv_nbytes
        assert plan.kv in KV_FORMATS


def test_a_table_has_a_slot_as_long_as_it_has_blocks() -> None:
    cache = cache_of(2)
    states = cache.states
    assert states is not None
    tables = [BlockTable() for _ in range(3)]
    tokens = [1, 2, 3, 4, 5]
    opened = [cache.open(table, lambda begin, end: tokens[begin:end], 5, 0) for table in tables]
    assert opened == [True, True, False], "two slots"
    assert sorted(table.state for table in tables) == [NO_SLOT, 0, 1]
    cache.release(tables[0])
    assert tables[0].state == NO_SLOT
    assert cache.open(tables[2], lambda begin, end: tokens[begin:end], 5, 0)
    assert not cache.set_aside(tables[2]), "states are not parked"
    assert states.num_free == 1
    cache.release(tables[2])
    assert states.num_free == 1


def test_a_fork_copies_the_state() -> None:
    cache = cache_of(3)
    assert cache.states is not None
    table, tokens = BlockTable(), [1, 2, 3]
    assert cache.open(table, lambda begin, end: tokens[begin:end], 3, 0)
    assert cache.grow(table, 3)
    cache.store(table, 3)
    for layer in (0, 2):
        cache.states.recurrent(layer)[table.state] = layer + 1.5
        cache.states.conv(layer)[table.state] = layer + 2
    other = cache.fork(table)
    assert other.state != table.state
    cache.states.recurrent(0)[table.state] = 0
    assert bool((cache.states.recurrent(0)[other.state] == 1.5).all())
    assert bool((cache.states.conv(2)[other.state] == 4).all())


def test_a_state_that_nobody_holds_is_not_given_back() -> None:
    pool = StatePool(StateSpec(GROUPS, "fp32"), 2)
    slot = pool.take()
    pool.give_back(slot)
    with pytest.raises(ValueError, match=f"state {slot} was given back"):
        pool.give_back(slot)
