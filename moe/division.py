"""Which of a layer's experts the CPU computes where they lie, while the others cross the link to a device. Torch-free:
the planner predicts with it what the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# Of a pass that has more tokens, and for rows beyond these, the CPU computes nothing: memory for them is page-locked.
MOST_TOKENS, MOST_ROWS = 128, 1024


@dataclass(frozen=True, slots=True)
class ExpertSeconds:
    """Seconds that an expert keeps the link busy; the CPU at least, to read it beside that link, and for each row; and
    those that a layer takes in which the CPU computes any."""

    link_s: float
    read_s: float
    row_s: float
    layer_s: float

    def on_cpu(self, rows: float) -> float:
        """Seconds of one expert."""
        return max(self.read_s, rows * self.row_s)


def divide(rows: Sequence[int], seconds: ExpertSeconds) -> tuple[int, float]:
    """How many of the experts, those with the fewest rows, the CPU computes so that the slower side ends first, and
    when that is. `rows` are ascending."""
    by_cpu = accumulate(map(seconds.on_cpu, rows), initial=0.0)
    ends = [
        max(computed + seconds.layer_s if count else 0.0, (len(rows) - count) * seconds.link_s)
        for count, computed in enumerate(by_cpu)
    ]
    count = min(range(len(ends)), key=ends.__getitem__)
    return count, ends[count]
