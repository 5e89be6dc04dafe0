"""Attention of the CPU to sequences in host memory, while a device waits for it: what it takes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv.spec import KVSpec
from ..shape.model_shape import ModelShape
from .presets import (
    ATTENDED_COHORT_S,
    ATTENDED_LAYER_S,
    ATTENDED_SEQUENCE_S,
    ATTENTION_READ_SHARE,
    CORE_ELEMENTS_S,
)
from .rates import Rates


def may_attend(shape: ModelShape, rates: Rates) -> bool:
    """Whether the CPU has kernels for such attention, and something is known of it, and copies leave it some of the
    memory's rate."""
    return (
        all(group.is_plain for group in shape.kv_groups) and rates.cores > 0 and rates.ram_bytes_s > rates.link_bytes_s
    )


@dataclass(frozen=True, slots=True)
class CPUAttention:
    """The seconds of the CPU for generated tokens of sequences in host memory, while a device waits for them."""

    specs: tuple[KVSpec, ...]
    rates: Rates

    def seconds(self, sequences: float, back: float, cohorts: float) -> float:
        """Of a pass: `sequences` that attend to `back` earlier tokens each, in `cohorts`."""
        if not sequences:
            return 0.0
        # What copies leave of the memory.
        bytes_s = ATTENTION_READ_SHARE * (self.rates.ram_bytes_s - self.rates.link_bytes_s)
        total = 0.0
        for spec in self.specs:
            group = spec.group
            tokens = sequences * min(back, group.window or back)
            numel = tokens * group.kv_heads * (group.head_dim + group.value_dim)
            computed = (numel / CORE_ELEMENTS_S + sequences * ATTENDED_SEQUENCE_S) / self.rates.cores
            read = tokens * spec.record_nbytes / spec.block / bytes_s
            total += len(group.layers) * (max(computed, read) + ATTENDED_LAYER_S + cohorts * ATTENDED_COHORT_S)
        return total
