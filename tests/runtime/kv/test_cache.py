"""Blocks are handed out once, grown all-or-nothing, and return what was written to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.quant.kv_format import KV_FORMATS
from moedge.runtime.kv.allocator import BlockAllocator
from moedge.runtime.kv.cache import BlockTable, KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.shape.model_shape import KVGroup

GROUPS = (KVGroup((0, 2), 2, 8, None), KVGroup((1,), 2, 8, 16))


def make_cache(num_blocks: int, block: int = 4, kv_format: str = "fp32") -> KVCache:
    return KVCache([KVPool(KVSpec(group, kv_format, block), num_blocks) for group in GROUPS], num_blocks)


def test_a_block_given_back_twice_is_an_error() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    assert taken is not None
    allocator.give_back(taken)
    with pytest.raises(ValueError, match="not all of them are in use"):
        allocator.give_back(taken)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_block_has_two_owners_and_none_is_lost(actions: list[tuple[int, int, bool]]) -> None:
    cache = make_cache(12)
    tables = [BlockTable() for _ in range(6)]
    for who, num_tokens, release in actions:
        if release:
            cache.release(tables[who])
            continue
        before = [list(blocks) for blocks in tables[who].blocks]
        if not cache.grow(tables[who], num_tokens):
            assert [list(blocks) for blocks in tables[who].blocks] == (before or [[], []])
    for group, allocator in enumerate(cache.allocators):
        held = [block for table in tables if table.blocks for block in table.blocks[group]]
        assert len(held) == len(set(held)) == allocator.num_used
        assert allocator.num_used + allocator.num_free == 12


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_gather_returns_what_was_written(kv_format: str) -> None:
    cache = make_cache(9, kv_format=kv_format)
    pool = cache.pools[0]
    k, v = torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    order = torch.tensor([7, 2, 5])
    positions = torch.arange(10)
    pool.write(1, order[positions // 4], positions % 4, k, v)
    out = torch.empty(2, 2, 12, 8)
    pool.gather(1, order, out)
    for gathered, stored in zip(out, pool.as_stored(k, v), strict=True):
        assert torch.equal(gathered[:, :10].transpose(0, 1), stored)
    pool.gather(0, order, out)
    assert not out.any(), "the group's other layer must be untouched"


def test_bytes_are_what_the_spec_says() -> None:
    cache = make_cache(5, block=32, kv_format="bf16")
    assert cache.nbytes == sum(pool.nbytes for pool in cache.pools)
    assert cache.token_nbytes == 3 * 2 * 2 * 8 * 2
