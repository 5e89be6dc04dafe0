"""The KV cache against a shadow: random passes, forks, preemptions; every sequence must read back its own tokens.

Memory is real but tiny: what is stored of a token is a checksum of it and all tokens before it, as its keys and values
depend on them; so a block that is written twice, freed early or found wrongly shows.
"""

import zlib
from collections import Counter
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moedge.quant.formats.format import Plane
from moedge.runtime.kv.allocator import NO_BLOCK, BlockAllocator, BlockTable, root_hash
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import BlockMemory
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.shape.model_shape import KVGroup

BLOCK = 4
WINDOWS = (None, 7)
NUM_BLOCKS = (15, 11)
HOST_BLOCKS = (6, 4)


class TokenPool:
    """A pool whose records are checksums, int32 a slot."""

    def __init__(self, window: int | None, num_blocks: int, block: int = BLOCK) -> None:
        self.spec = KVSpec(KVGroup((0,), 1, 1, window), "fp16", block)
        record = Plane("checksums", "uint8", (4 * block,), 0)
        self.memory = BlockMemory(
            [record], 1, num_blocks, torch.zeros(num_blocks * self.spec.record_nbytes, dtype=torch.uint8)
        )
        self.memory.bytes.fill_(0xFF)
        self.nbytes = self.memory.bytes.numel()
        self.checksums = self.memory.plane(0, record).view(torch.int32)

    def slots(self, block_id: int) -> torch.Tensor:
        return self.checksums[block_id]


class Text:
    """A sequence: its tokens, of which the table's are stored."""

    def __init__(self, token_ids: list[int], table: BlockTable) -> None:
        self.token_ids = token_ids
        self.table = table

    def tokens(self, begin: int, end: int) -> list[int]:
        return self.token_ids[begin:end]

    def stored(self, position: int) -> int:
        return zlib.crc32(bytes(self.token_ids[: position + 1])) >> 1

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.table.num_tokens


# Few different beginnings, so that texts share blocks.
texts = st.lists(st.sampled_from([[1] * 4, [1, 1, 1, 2], [2] * 5, [3]]), min_size=1, max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)


class CacheMachine(RuleBasedStateMachine):
    """`running` texts hold blocks, `waiting` ones were preempted. `happened` counts what was exercised."""

    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        pools = [TokenPool(window, count) for window, count in zip(WINDOWS, NUM_BLOCKS, strict=True)]
        self.pools = pools
        host = [
            torch.zeros(count, pool.spec.block_nbytes, dtype=torch.uint8)
            for count, pool in zip(HOST_BLOCKS, pools, strict=True)
        ]
        self.cache = KVCache(pools, root=root_hash("machine"), host_slots=host)
        self.running: list[Text] = []
        self.waiting: list[Text] = []

    @rule(data=st.data())
    def run_pass(self, data: Any) -> None:
        """As the scheduler does: grow, publish, admit others who may find what is not written yet, write, store."""
        grown = []
        for text in data.draw(st.permutations(self.running)):
            if not text.num_pending:
                text.token_ids.append(data.draw(st.integers(1, 3)))
            count = min(data.draw(st.integers(1, 9)), text.num_pending)
            assert (count <= self.cache.headroom(text.table)) == (count == 0 or self._can_grow(text, count))
            before = self._snapshot()
            if self.cache.grow(text.table, text.table.num_tokens + count):
                grown.append((text, count))
            else:
                assert self._snapshot() == before, "a refused growth changed something"
        for text, _ in grown:
            self.cache.publish(text.table, text.tokens)
        grown += self._admit(data)
        for text, count in grown:
            self._write(text, count)
        for text, count in grown:
            self.cache.store(text.table, count)
            self.happened["freed behind window"] += NO_BLOCK in text.table.blocks[1]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        text = data.draw(st.sampled_from(self.running))
        if text.table.num_tokens == text.table.num_grown:
            self.running.append(Text(list(text.token_ids), self.cache.fork(text.table)))
            self.happened["fork in a block"] += text.table.num_tokens % BLOCK > 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        text = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        parked = self.cache.set_aside(text.table)
        assert parked == bool(text.table.parked)
        self.waiting.append(text)
        self.happened["park" if parked else "preempt"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        self.cache.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))).table)

    def _admit(self, data: Any) -> list[tuple[Text, int]]:
        """A preempted text, or a new one."""
        if self.waiting and data.draw(st.booleans()):
            text = self.waiting[data.draw(st.integers(0, len(self.waiting) - 1))]
        else:
            text = Text(data.draw(texts), BlockTable())
        before, parked = self._snapshot(), bool(text.table.parked)
        if not text.num_pending:
            text.token_ids.append(1)
        if not self.cache.open(text.table, text.tokens, len(text.token_ids), data.draw(st.integers(0, 2))):
            assert self._snapshot() == before, "a refused admission changed something"
            return []
        self.happened["unpark" if parked else "hit" if text.table.num_tokens else "miss"] += 1
        if text in self.waiting:
            self.waiting.remove(text)
        self.running.append(text)
        count = min(text.num_pending, self.cache.headroom(text.table))
        assert count > 0, "admitted, but not a single token fits"
        assert self.cache.grow(text.table, text.table.num_tokens + count)
        self.cache.publish(text.table, text.tokens)
        return [(text, count)]

    def _can_grow(self, text: Text, count: int) -> bool:
        missing = [
            group.missing(blocks, text.table.num_tokens + count, text.table.num_tokens)
            for group, blocks in zip(self.cache.groups, text.table.blocks, strict=True)
        ]
        return all(n <= group.allocator.num_available for n, group in zip(missing, self.cache.groups, strict=True))

    def _write(self, text: Text, count: int) -> None:
        for position in range(text.table.num_tokens, text.table.num_tokens + count):
            for pool, blocks in zip(self.pools, text.table.blocks, strict=True):
                pool.slots(blocks[position // BLOCK])[position % BLOCK] = text.stored(position)

    def _snapshot(self) -> Any:
        tables = [
            ([list(blocks) for blocks in text.table.blocks], text.table.num_tokens, text.table.num_grown)
            for text in self.running + self.waiting
        ]
        allocators = [group.allocator for group in self.cache.groups]
        return tables, [(a.num_free, list(a._cached), a.num_references) for a in allocators]

    @invariant()
    def every_text_reads_back_its_tokens(self) -> None:
        for text in self.running:
            for pool, blocks in zip(self.pools, text.table.blocks, strict=True):
                first = pool.spec.group.first_visible(text.table.num_tokens)
                for position in range(first, text.table.num_tokens):
                    block_id = blocks[position // BLOCK]
                    assert block_id != NO_BLOCK, "a block was freed that is still looked back to"
                    assert pool.slots(block_id)[position % BLOCK] == text.stored(position)

    @invariant()
    def references_are_those_of_tables(self) -> None:
        for index, group in enumerate(self.cache.groups):
            _check_allocator(group.allocator, [text.table.blocks[index] for text in self.running])
        assert self.cache.host is not None
        for index, allocator in enumerate(tier.allocator for tier in self.cache.host.tiers):
            _check_allocator(allocator, [text.table.parked[index] for text in self.waiting if text.table.parked])

    @invariant()
    def usage_adds_up_and_counts_shared_tokens_once(self) -> None:
        usage = self.cache.usage(text.table for text in self.running)
        assert usage.allocated == self.cache.nbytes
        live = 0
        for index, pool in enumerate(self.pools):
            places = {
                (text.table.blocks[index][position // BLOCK], position % BLOCK)
                for text in self.running
                for position in range(pool.spec.group.first_visible(text.table.num_tokens), text.table.num_grown)
            }
            live += len(places) * pool.spec.block_nbytes // BLOCK
        assert usage.live == live

    @invariant()
    def nothing_whole_behind_a_window_is_kept(self) -> None:
        for text in self.running:
            for pool, blocks in zip(self.pools, text.table.blocks, strict=True):
                first = pool.spec.first_block(text.table.num_tokens)
                assert all(block_id == NO_BLOCK for block_id in blocks[:first])


def _check_allocator(allocator: BlockAllocator, lists: list[list[int]]) -> None:
    held = Counter(block_id for blocks in lists for block_id in blocks if block_id != NO_BLOCK)
    assert {block_id: allocator.references(block_id) for block_id in held} == held
    assert allocator.num_live == len(held)
    assert allocator.num_references == held.total()
    assert allocator.num_live + allocator.num_cached + allocator.num_free == allocator.num_blocks
    assert not set(allocator._free) & (set(held) | set(allocator._cached))
