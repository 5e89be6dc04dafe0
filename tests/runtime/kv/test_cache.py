"""Blocks are handed out once, grown all-or-nothing, and return what was written to them."""

import pytest
import torch

from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.kv.allocator import BlockAllocator, BlockTable, TokenSource, root_hash
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.shape.model_shape import KVGroup

GROUPS = (KVGroup((0, 2), 2, 8, None), KVGroup((1,), 2, 8, 16))


def make_cache(num_blocks: int, block: int = 4, kv_format: str = "fp32") -> KVCache:
    return KVCache([KVPool(KVSpec(group, kv_format, block), num_blocks) for group in GROUPS])


def prompt(token_ids: list[int]) -> TokenSource:
    return lambda begin, end: token_ids[begin:end]


def test_a_block_given_back_twice_is_an_error() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    allocator.release(taken)
    with pytest.raises(ValueError, match="nobody holds it"):
        allocator.release(taken)


def test_released_blocks_are_found_until_others_are_used_up_and_the_oldest_goes_first() -> None:
    allocator = BlockAllocator(4)
    for name in (b"a", b"b", b"c"):
        (block_id,) = allocator.take(1)
        allocator.publish(block_id, name)
    allocator.release([1, 0, 2])
    assert (allocator.num_cached, allocator.num_free) == (3, 1)
    assert allocator.take(2) == [3, 1]
    assert [allocator.find(name) for name in (b"a", b"b", b"c")] == [0, None, 2]
    allocator.share(0)
    assert allocator.take(1) == [2]
    with pytest.raises(ValueError, match="1 blocks were wanted and 0 are available"):
        allocator.take(1)


def test_equal_beginnings_are_found_and_other_settings_are_not() -> None:
    cache, other = make_cache(12), make_cache(12)
    other._root = root_hash("another model")
    token_ids = list(range(11))
    first, second, third = BlockTable(), BlockTable(), BlockTable()
    assert cache.open(first, prompt(token_ids), 11, 0)
    assert cache.grow(first, 11)
    cache.publish(first, prompt(token_ids))
    assert cache.open(second, prompt([*token_ids[:9], 5, 5, 5]), 12, 0)
    assert second.num_tokens == 8
    assert second.blocks[0] == first.blocks[0][:2]
    other._hash(third, prompt(token_ids), 2)
    assert not set(third.hashes) & set(first.hashes)


def test_the_last_token_is_never_found() -> None:
    """Its logits are wanted: a prompt that is stored to the end is computed from the last block on."""
    cache = make_cache(12)
    token_ids = list(range(8))
    first, second = BlockTable(), BlockTable()
    assert cache.open(first, prompt(token_ids), 8, 0)
    cache.grow(first, 8)
    cache.publish(first, prompt(token_ids))
    assert cache.open(second, prompt(token_ids), 8, 0)
    assert second.num_tokens == 4


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
    for gathered, stored in zip(out, pool.as_stored(1, k, v), strict=True):
        assert torch.equal(gathered[:, :10].transpose(0, 1), stored)
    pool.gather(0, order, out)
    assert not out.any(), "the group's other layer must be untouched"


def test_bytes_are_what_the_spec_says() -> None:
    cache = make_cache(5, block=32, kv_format="bf16")
    assert cache.nbytes == sum(pool.nbytes for pool in cache.pools)
    assert cache.token_nbytes == 3 * 2 * 2 * 8 * 2
