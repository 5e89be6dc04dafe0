"""Counters of a run: what passes did and how long sequences took. Observes, never steers; knows no output format."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ..kv.usage import Usage
from .batch import Batch
from .sequence import Sequence

QUANTILES = (0.50, 0.95, 0.99)


def _seconds() -> array[float]:
    """Eight bytes a sequence, where a list takes thirty-two: jobs have hundreds of thousands."""
    return array("d")


@dataclass(slots=True)
class Metrics:
    """Sums over passes; `kv` adds up what the cache's bytes were used for in each.

    `prompt_tokens` were computed, not found in the cache. `finished_tokens` is what finished sequences
    generated, `finished_limit` what they might have.
    """

    passes: int = 0
    pass_tokens: int = 0
    pass_sequences: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_tokens: int = 0
    finished_limit: int = 0
    kv: Usage = field(default_factory=Usage)
    ttft: array[float] = field(default_factory=_seconds)
    tpot: array[float] = field(default_factory=_seconds)
    total: array[float] = field(default_factory=_seconds)

    def count_pass(self, batch: Batch, kv: Usage) -> None:
        self.passes += 1
        self.pass_tokens += batch.num_tokens
        self.pass_sequences += len(batch.chunks)
        self.generated_tokens += len(batch.sampling)
        for chunk in batch.chunks:
            self.prompt_tokens += max(0, min(len(chunk.sequence.prompt_ids) - chunk.past, chunk.count))
        self.kv.add(kv)

    def count_finished(self, sequence: Sequence) -> None:
        clock, num_tokens = sequence.clock, len(sequence.output_ids) - sequence.num_replayed
        if num_tokens == 0:
            return
        self.finished_tokens += num_tokens
        self.finished_limit += sequence.params.max_tokens - sequence.num_replayed
        self.ttft.append(clock.first_token - clock.added)
        self.total.append(clock.ended - clock.added)
        if num_tokens > 1:
            self.tpot.append((clock.ended - clock.first_token) / (num_tokens - 1))

    @property
    def waste(self) -> float | None:
        """Share of the bytes of live KV blocks that stored no token, integrated over passes."""
        held = self.kv.live + self.kv.waste
        return self.kv.waste / held if held else None


def quantiles(values: Items[float]) -> tuple[float, ...] | None:
    """The p50, p95 and p99 of `values` by nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES)
