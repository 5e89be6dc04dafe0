"""The cache with one rule left out: the state machine must catch each of these, or it proves nothing."""

from moedge.runtime.kv.allocator import BlockAllocator, BlockTable, GroupCache, TokenSource
from support.kv.cache_machine import BLOCK, CacheMachine


class NoCopyOnWrite(CacheMachine):
    """a block that others hold too is written to"""

    def __init__(self) -> None:
        super().__init__()
        for group in self.cache.groups:
            group._shares_tail = lambda blocks, stored: 0


class NoReference(CacheMachine):
    """sharing a block does not count"""

    def __init__(self) -> None:
        super().__init__()
        for group in self.cache.groups:
            group.allocator.share = lambda block_id: None


class StillCached(CacheMachine):
    """a cached block that is shared again can still be evicted"""

    def __init__(self) -> None:
        super().__init__()
        for group in self.cache.groups:
            group.allocator.share = _share_without_leaving(group.allocator)


class HashWithoutPast(CacheMachine):
    """a block's hash covers its own tokens only"""

    def __init__(self) -> None:
        super().__init__()
        self.cache._hash = _hash_without_past


class ShortWindow(CacheMachine):
    """blocks behind the window are freed a token too early"""

    def __init__(self) -> None:
        super().__init__()
        for group in self.cache.groups:
            group.trim = _trim_early(group)


class TailLeftBehind(CacheMachine):
    """parking forgets the block that is not full"""

    def __init__(self) -> None:
        super().__init__()
        assert self.cache.host is not None
        park = self.cache.host.park

        def cut(table: BlockTable) -> bool:
            whole = table.num_tokens
            table.num_tokens -= whole % self.cache.block
            parked = park(table)
            table.num_tokens = whole
            return parked

        self.cache.host.park = cut


def _hash_without_past(table: BlockTable, tokens: TokenSource, num_blocks: int) -> None:
    for index in range(len(table.hashes), num_blocks):
        table.hashes.append(bytes(tokens(index * BLOCK, (index + 1) * BLOCK)))


def _share_without_leaving(allocator: BlockAllocator):
    def share(block_id: int) -> None:
        allocator._references[block_id] += 1
        allocator.num_references += 1

    return share


def _trim_early(group: GroupCache):
    trim = group.trim
    return lambda blocks, num_tokens: trim(blocks, num_tokens + 1)


BROKEN = (NoCopyOnWrite, NoReference, StillCached, HashWithoutPast, ShortWindow, TailLeftBehind)
