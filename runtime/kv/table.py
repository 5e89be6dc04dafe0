"""Which blocks hold the tokens of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """A list of blocks per layer group: entry i holds tokens i * block and on; NO_BLOCK where it was given back.

    `num_tokens` are stored, `num_grown` have room: the difference is what the pass stores. `hashes` are those of the
    full blocks as far as anybody asked, of which `num_published` can be found by others. `parked` are blocks of the
    host tier; a table has either those or `blocks`.
    """

    blocks: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    num_grown: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    parked: list[list[int]] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets the blocks; the hashes stay, because the sequence's tokens do."""
        self.blocks = []
        self.num_tokens = self.num_grown = self.num_published = 0
