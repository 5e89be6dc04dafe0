"""The memory of weights knows which shard is in which slot, also after experts were swapped."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.offload.stream.stream import DENSE, ShardKey
from moedge.runtime.plan.placement import Placement
from moedge.runtime.shape.shards import LayerShards, ModelShards, ShardLayout
from moedge.runtime.weights.memory import WeightMemory

NBYTES, EXPERTS = 4096, 4
HELD = Placement(held_dense=2, held_experts=(2, 1), dense_ring=0, expert_ring=NBYTES)


def opened(staging: Placement | None) -> WeightMemory:
    """Two layers of experts without linears; what is kept holds its layer and its expert as bytes."""
    matrix: Any = SimpleNamespace(end=NBYTES)
    layer = LayerShards(ShardLayout(()), ShardLayout((matrix,)), EXPERTS)
    memory = WeightMemory(ModelShards((layer, layer), None), HELD, staging)
    for key in [*memory.held, *memory.staged]:
        if memory.nbytes(key):
            with memory.fill(key) as shard:
                shard[:] = number(key)
    return memory


def number(key: ShardKey) -> int:
    return 16 * key.layer + key.expert


def check(memory: WeightMemory) -> None:
    """Every expert is in one tier, and where the memory says."""
    experts = {key for key in memory.held if key.expert != DENSE}
    assert sorted([*experts, *memory.staged, *memory.on_disk]) == sorted(memory.experts)
    assert set(memory.streamed) == {*memory.staged, *memory.on_disk}
    assert all((memory.shard(key) == number(key)).all() for key in experts)
    assert all((memory.slab.bytes[slot] == number(key)).all() for key, slot in memory.staged.items())


@pytest.mark.parametrize("staged", [False, True])
def test_a_swap_moves_both_experts(staged: bool) -> None:
    memory = opened(replace(HELD, held_experts=(3, 3)) if staged else None)
    check(memory)
    for leaving, entering in (((0, 0), (1, 2)), ((1, 0), (0, 3)), ((1, 2), (0, 0)), ((0, 1), (1, 0))):
        slot = memory.shard(ShardKey(*leaving))
        view = torch.full((NBYTES,), number(ShardKey(*entering)), dtype=torch.uint8)
        taken = memory.swap(ShardKey(*leaving), ShardKey(*entering), view)
        assert taken.data_ptr() == slot.data_ptr()
        assert ShardKey(*entering) in memory.held
        assert ShardKey(*leaving) not in memory.held
        check(memory)


def test_only_what_is_held_leaves() -> None:
    memory = opened(None)
    with pytest.raises(KeyError):
        memory.swap(ShardKey(0, 3), ShardKey(0, 2), torch.zeros(NBYTES, dtype=torch.uint8))


def test_more_memory_has_slots_for_more_experts_and_no_byte_more() -> None:
    """They are held like the others: swapped, found, and never beyond the bytes that were granted."""
    memory = opened(None)
    before = memory.held_nbytes
    for key in (ShardKey(0, 2), ShardKey(1, 3)):
        assert memory.take(key, torch.full((NBYTES,), number(key), dtype=torch.uint8)) is None
    memory.grow(3 * NBYTES - 1)
    assert memory.held_nbytes == before + 2 * NBYTES
    for key in (ShardKey(0, 2), ShardKey(1, 3)):
        slot = memory.take(key, torch.full((NBYTES,), number(key), dtype=torch.uint8))
        assert slot is not None
        assert slot.data_ptr() == memory.shard(key).data_ptr()
        check(memory)
    assert memory.take(ShardKey(0, 3), torch.zeros(NBYTES, dtype=torch.uint8)) is None
    for leaving, entering in (((0, 2), (0, 3)), ((0, 0), (0, 2)), ((1, 3), (0, 0))):
        view = torch.full((NBYTES,), number(ShardKey(*entering)), dtype=torch.uint8)
        memory.swap(ShardKey(*leaving), ShardKey(*entering), view)
        check(memory)
