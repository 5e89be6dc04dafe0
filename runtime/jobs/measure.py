"""How much work a file of rows is, in tokens, before a weight is loaded. Reads and tokenizes every row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..plan.job import JobShape
from ..sampling.params import SamplingParams
from .encode import RowEncoder
from .order import SpeedOrder
from .rows import BadRow, Row, RowError

Choices = Sequence[tuple[list[int], SamplingParams]]
_FIRST = 1 << 62


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

    def add(self, choices: Choices | RowError) -> int:
        """Returns the most tokens that one of the choices may come to; 0 for a row that will not run."""
        self.rows += 1
        if isinstance(choices, RowError):
            self.too_long += choices.code == "context_length_exceeded"
            return 0
        self.sequences += len(choices)
        self.prompt_tokens += sum(len(token_ids) for token_ids, _ in choices)
        self.max_generated_tokens += sum(params.max_tokens for _, params in choices)
        longest = max(len(token_ids) + params.max_tokens for token_ids, params in choices)
        self.lengths[longest] += 1
        return longest

    def longer_than(self, num_tokens: int) -> int:
        """Rows with a sequence that may come to more."""
        return sum(count for length, count in self.lengths.items() if length > num_tokens)

    def shape(self) -> JobShape:
        if not self.lengths:
            return JobShape(1, 2)
        return JobShape(
            self.sequences, max(self.lengths), min(self.lengths), self.prompt_tokens, self.max_generated_tokens
        )


def measure(rows: Iterable[Row | BadRow], encoder: RowEncoder) -> tuple[JobSize, SpeedOrder]:
    """Rows that will not run come first in the order: their errors need no pass."""
    size, order = JobSize(), SpeedOrder()
    for row in rows:
        choices = row.error if isinstance(row, BadRow) else encoder.encode(row)
        longest = size.add(choices)
        order.add(row.index, () if isinstance(choices, RowError) else choices[0][0], longest or _FIRST)
    return size, order
