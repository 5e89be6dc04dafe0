"""Which blocks are free. Integers only: no bytes, no tensors, no layers."""

from __future__ import annotations


class BlockAllocator:
    """Hands out block ids, lowest first while fresh, most recently freed first after that."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int] | None:
        """`count` block ids, or None, and nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        """Raises ValueError for a block that is not in use: its bytes would be handed out twice."""
        if not self._used.issuperset(block_ids) or len(set(block_ids)) != len(block_ids):
            raise ValueError(f"blocks {block_ids[:8]} were given back, but not all of them are in use")
        self._used.difference_update(block_ids)
        self._free.extend(block_ids)
