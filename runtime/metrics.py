"""Counters of a run: what passes did and how long sequences took. Observes, never steers; knows no output format."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from .batch import Batch
from .sequence import Sequence

QUANTILES = (0.50, 0.95, 0.99)


@dataclass(slots=True)
class Metrics:
    """Sums over passes; `waste` integrates token places that live sequences hold without using them."""

    passes: int = 0
    pass_tokens: int = 0
    pass_sequences: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    held_slots: int = 0
    live_slots: int = 0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)

    def count_pass(self, batch: Batch, held_slots: int, live_slots: int) -> None:
        self.passes += 1
        self.pass_tokens += batch.num_tokens
        self.pass_sequences += len(batch.chunks)
        self.generated_tokens += len(batch.sampling)
        for chunk in batch.chunks:
            self.prompt_tokens += max(0, min(len(chunk.sequence.prompt_ids) - chunk.past, chunk.count))
        self.held_slots += held_slots
        self.live_slots += live_slots

    def count_finished(self, sequence: Sequence) -> None:
        clock, num_tokens = sequence.clock, len(sequence.output_ids)
        if num_tokens == 0:
            return
        self.ttft.append(clock.first_token - clock.added)
        self.total.append(clock.ended - clock.added)
        if num_tokens > 1:
            self.tpot.append((clock.ended - clock.first_token) / (num_tokens - 1))

    @property
    def waste(self) -> float | None:
        """Share of held KV places that stored no token, over all passes."""
        return 1 - self.live_slots / self.held_slots if self.held_slots else None


def quantiles(values: Items[float]) -> tuple[float, ...] | None:
    """The p50, p95 and p99 of `values` by nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES)
