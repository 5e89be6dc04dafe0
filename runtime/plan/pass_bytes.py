"""The bytes that a pass brings over a link: weights that are not held, keys and values in host memory. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ...moe.expected_rows import wanted_by
from ..kv.cohorts import CohortSizes
from ..shape.shards import ModelShards
from .placement import Placement


class StreamedWeightBytes:
    """Bytes that a pass brings over one link: dense shards that are not held, and wanted experts that are not."""

    def __init__(self, shards: ModelShards, held: Placement) -> None:
        self._dense = shards.held_nbytes[-1] - shards.held_nbytes[held.held_dense]
        # By the share of a layer's experts that a token asks for: bytes, and how many.
        self._experts: Counter[float] = Counter()
        self._counts: Counter[float] = Counter()
        for (share, missing, nbytes), layers in held.missing_experts(shards).items():
            self._experts[share] += layers * missing * nbytes
            self._counts[share] += layers * missing

    def nbytes(self, tokens: float) -> float:
        return self._dense + sum(nbytes * wanted_by(tokens, share) for share, nbytes in self._experts.items())

    def arrivals(self, tokens: float) -> float:
        """Experts that are read."""
        return sum(count * wanted_by(tokens, share) for share, count in self._counts.items())


class HostKVBytes:
    """Cohorts in host memory that passes read: those that sequences need which the device has no blocks for."""

    def __init__(self, sizes: CohortSizes | None, blocks: Sequence[int], most: float, layers: int) -> None:
        """The device has `blocks`; `most` sequences fill these and all cohorts."""
        self._sizes, self._here, self._most, self.layers = sizes, blocks[0], most, layers
        self.cohort_nbytes = sizes.cohort_nbytes if sizes else 0

    def cohorts(self, sequences: float) -> int:
        """The cohorts that `sequences` fill, the last one perhaps in part."""
        if self._sizes is None:
            return 0
        used = self._used(self._sizes, sequences)
        return min(self._sizes.count, math.ceil(max(0.0, used - self._here) / self._sizes.blocks[0]))

    def sequences(self, sequences: float) -> float:
        """How many of `sequences` are in cohorts."""
        if self._sizes is None or not sequences:
            return 0.0
        return sequences * max(0.0, 1 - self._here / self._used(self._sizes, sequences))

    def _used(self, sizes: CohortSizes, sequences: float) -> float:
        """Blocks that `sequences` fill."""
        return sequences / self._most * (self._here + sizes.count * sizes.blocks[0])
