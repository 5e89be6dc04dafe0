"""Slots of the state pool for block tables, and snapshots: which states are kept, where, and who finds them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .states import NO_SLOT, StatePool
from .usage import BlockTable

# Hashes of blocks that are remembered to find where sequences part: those of a million tokens, in 4 MiB.
_MOST_HASHES = 1 << 15


class StateSlots:
    """Gives tables their slots of a pool. A sequence that begins with a prefix reads the snapshot's slot in its first
    pass and writes its own, so that no state is copied, and the snapshot may be of the same pass.

    Snapshots are kept at ends of blocks of `block` tokens: where sequences that were announced part, which evicts
    the least recently used ones; and at ends of chunks of prompts that go on, where a slot is free.
    """

    def __init__(self, pool: StatePool, block: int) -> None:
        self.pool = pool
        self._allocator = pool.allocator
        # States can be kept at multiples of this number of tokens, and of blocks.
        self._step = math.lcm(block, pool.cut)
        self._blocks = self._step // block
        self._num_planned = 0
        self._known: dict[bytes, None] = {}
        self._partings: dict[bytes, None] = {}

    def expect(self, hashes: list[bytes]) -> None:
        """Announces a sequence by the hashes of its prompt's blocks."""
        common = 0
        while common < len(hashes) and hashes[common] in self._known:
            common += 1
        common -= common % self._blocks
        if common:
            _remember(self._partings, hashes[common - 1 : common])
        _remember(self._known, hashes)

    def kept(self, hashes: list[bytes]) -> list[bool]:
        """For k = 0 to len(hashes): whether a sequence can go on after k blocks."""
        return [True, *(self._allocator.find(content) is not None for content in hashes)]

    def open(self, table: BlockTable, hashes: list[bytes]) -> bool:
        """Gives the table of a sequence a slot, and the snapshot after blocks with these hashes, which `kept` found.

        Returns False, and changes nothing, where no slot is left.
        """
        origin = self._allocator.find(hashes[-1]) if hashes else None
        pinned = origin is not None and not self._allocator.references(origin)
        if self._allocator.num_available < 1 + pinned:
            return False
        if origin is not None:
            self._allocator.share(origin)
            table.origin = origin
        table.state = self.pool.take()
        return True

    def plan(self, table: BlockTable, prompt: int) -> None:
        """Chooses the snapshots of the next pass of a table, of the states of the first `prompt` tokens."""
        end = min(prompt, table.num_grown) // self._step * self._step
        for position in range(table.num_tokens // self._step * self._step + self._step, end + 1, self._step):
            content = table.hashes[position // self._step * self._blocks - 1]
            if self._allocator.find(content) is not None:
                continue
            parts = content in self._partings
            goes_on = position == end and table.num_grown < prompt and self._allocator.num_free
            if (parts or goes_on) and self._num_planned < self.pool.most_snapshots and self.pool.num_free:
                slot = self.pool.take()
                self._allocator.publish(slot, content)
                table.snapshots.append((position, slot))
                self._num_planned += 1

    def settle(self, table: BlockTable) -> None:
        """A pass of the table is over: its snapshots belong to nobody now, and it has a state of its own."""
        if table.origin != NO_SLOT:
            self.pool.give_back(table.origin)
            table.origin = NO_SLOT
        for _, slot in table.snapshots:
            self.pool.give_back(slot)
        self._num_planned -= len(table.snapshots)
        table.snapshots.clear()

    def retract(self, table: BlockTable) -> None:
        """The pass failed: nobody finds its snapshots."""
        for _, slot in table.snapshots:
            self._allocator.forget(slot)

    def fork(self, table: BlockTable) -> int:
        """A slot with a copy of the table's state."""
        slot = self.pool.take()
        self.pool.copy(table.state, slot)
        return slot

    def release(self, table: BlockTable) -> None:
        self.settle(table)
        if table.state != NO_SLOT:
            self.pool.give_back(table.state)
            table.state = NO_SLOT


def _remember(known: dict[bytes, None], hashes: Iterable[bytes]) -> None:
    """Adds hashes, as the newest; the oldest are forgotten beyond the limit."""
    for content in hashes:
        known.pop(content, None)
        known[content] = None
    while len(known) > _MOST_HASHES:
        del known[next(iter(known))]
