"""The sizes of cohorts of sequences whose keys and values lie in host memory (host.py). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .spec import KVSpec

# Bytes of one layer of a cohort, of which few fit in a device: 2 ms of eight lanes of PCIe 4, against which 0.1 ms of
# launches are small (presets.py, COHORT_LAUNCHES).
LAYER_NBYTES = 24 << 20
# Layers of cohorts on a device at a time: one is attended to, the next ones arrive.
WINDOWS = 3
# Layers whose new tokens may be on their way down at a time.
STAGINGS = 4
_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class CohortSizes:
    """`count` cohorts of `blocks`, by layer group, together `nbytes` of host memory for `sequences` at their longest.

    The device has a ring of `window_nbytes` for layers that arrive, and `staging_nbytes` for the new tokens of a layer
    in a pass, of which the host has several. Where the CPU attends to cohorts that only generate, queries and
    results of a pass take `rows_nbytes` of the host each; else 0.
    """

    count: int
    sequences: int
    blocks: tuple[int, ...]
    nbytes: int
    window_nbytes: int
    staging_nbytes: int
    rows_nbytes: int = 0

    @classmethod
    def of(
        cls,
        specs: Sequence[KVSpec],
        count: int,
        sequences: int,
        blocks: tuple[int, ...],
        tokens_per_pass: int,
        row_nbytes: int = 0,
    ) -> Self:
        """`count` cohorts of `blocks`, in passes of `tokens_per_pass`, whose queries take `row_nbytes` each."""
        pairs = list(zip(specs, blocks, strict=True))
        layers = [number * spec.record_nbytes for spec, number in pairs]
        window = WINDOWS * max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in layers)
        staging = max(spec.blocks_for(tokens_per_pass) * spec.record_nbytes for spec in specs)
        nbytes = count * sum(number * spec.block_nbytes for spec, number in pairs)
        return cls(count, sequences, blocks, nbytes, window, staging, tokens_per_pass * row_nbytes)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory, all page-locked."""
        return self.nbytes + STAGINGS * self.staging_nbytes + 2 * self.rows_nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes of the device."""
        return self.window_nbytes + self.staging_nbytes

    @property
    def empty_nbytes(self) -> int:
        """Bytes of the windows that are for prompts that begin, in which nothing arrives."""
        return self.window_nbytes // WINDOWS if self.rows_nbytes else 0

    @property
    def cohort_nbytes(self) -> int:
        """Bytes that cross the link for a cohort in a pass."""
        return self.nbytes // self.count
