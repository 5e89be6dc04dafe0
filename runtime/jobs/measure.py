"""How much work a file of rows is, in tokens, before a weight is loaded. Reads and tokenizes every row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..plan.job import JobShape
from .encode import RowEncoder
from .rows import BadRow, Row, RowError


@dataclass(slots=True)
class JobSize:
    """Tokens of all prompts, the most that can be generated, and how long the sequences may become."""

    rows: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    max_generated_tokens: int = 0
    too_long: int = 0
    # Rows by the tokens that their longest sequence may come to.
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, row: Row | BadRow, encoder: RowEncoder) -> None:
        self.rows += 1
        if isinstance(row, BadRow):
            return
        choices = encoder.encode(row)
        if isinstance(choices, RowError):
            self.too_long += choices.code == "context_length_exceeded"
            return
        self.sequences += len(choices)
        self.lengths[max(len(token_ids) + params.max_tokens for token_ids, params in choices)] += 1
        for token_ids, params in choices:
            self.prompt_tokens += len(token_ids)
            self.max_generated_tokens += params.max_tokens

    def longer_than(self, num_tokens: int) -> int:
        """Rows with a sequence that may come to more."""
        return sum(count for length, count in self.lengths.items() if length > num_tokens)

    def shape(self) -> JobShape:
        if not self.lengths:
            return JobShape(1, 2)
        return JobShape(
            self.sequences, max(self.lengths), min(self.lengths), self.prompt_tokens, self.max_generated_tokens
        )


def measure(rows: Iterable[Row | BadRow], encoder: RowEncoder) -> JobSize:
    size = JobSize()
    for row in rows:
        size.add(row, encoder)
    return size
