"""How much work a file of rows is, in tokens, before a weight is loaded. Reads and tokenizes every row once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .encode import RowEncoder
from .rows import BadRow, Row, RowError


@dataclass(slots=True)
class JobSize:
    """Tokens of all prompts, the most that can be generated, and the longest sequence that may come of them."""

    rows: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    max_generated_tokens: int = 0
    longest: int = 0
    too_long: int = 0

    def add(self, row: Row | BadRow, encoder: RowEncoder) -> None:
        self.rows += 1
        if isinstance(row, BadRow):
            return
        choices = encoder.encode(row)
        if isinstance(choices, RowError):
            self.too_long += choices.code == "context_length_exceeded"
            return
        self.sequences += len(choices)
        for token_ids, params in choices:
            self.prompt_tokens += len(token_ids)
            self.max_generated_tokens += params.max_tokens
            self.longest = max(self.longest, len(token_ids) + params.max_tokens)


def measure(rows: Iterable[Row | BadRow], encoder: RowEncoder) -> JobSize:
    size = JobSize()
    for row in rows:
        size.add(row, encoder)
    return size
