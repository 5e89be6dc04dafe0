"""How a candidate's sequences are divided between a device and host memory. Torch-free.

A byte of keys and values that a device holds saves a byte of its link in every pass, as a byte of weights does that
every pass wants; so the device first takes what a pass cannot do without, then sequences, then weights; or all weights
and then sequences. The rest of the sequences are cohorts in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..kv.cohorts import LAYER_NBYTES, CohortSizes
from .candidate import Candidate
from .placement import device_ring


@dataclass(frozen=True, slots=True)
class Room:
    """Where a candidate's sequences are: `cached` of them, at their longest, in `blocks` of the tier that computes, the
    others in `host_kv`. `free_nbytes` of that tier are left for weights."""

    cached: int
    blocks: tuple[int, ...]
    free_nbytes: int
    host_kv: CohortSizes | None = None

    @property
    def all_blocks(self) -> tuple[int, ...]:
        """Blocks by layer group, cohorts included."""
        if self.host_kv is None:
            return self.blocks
        return tuple(
            here + self.host_kv.count * there for here, there in zip(self.blocks, self.host_kv.blocks, strict=True)
        )


def rooms(
    candidate: Candidate, sequences: int, budget_nbytes: int, host_nbytes: int, row_nbytes: int = 0
) -> Iterator[Room]:
    """The ways to keep `sequences` at their longest with a budget of the tier that computes, all of them there first.

    Host memory takes at most `host_nbytes`, all page-locked; 0 where it may take none. `row_nbytes` of it are for each
    token of a pass where the CPU may attend to cohorts, which it then does or not; else 0.
    """
    weights, cache, free = candidate.weights, candidate.cache, budget_nbytes - candidate.fixed
    blocks = cache.blocks(sequences)
    if (left := free - cache.nbytes_of(blocks)) >= weights.streaming_nbytes:
        yield Room(sequences, blocks, left)
    if not host_nbytes or not weights.on_device or any(spec.group.is_index for spec in cache.specs):
        return
    for nbytes in sorted({0, row_nbytes}):
        yield from _hosted(candidate, sequences, free, host_nbytes, nbytes)


def _hosted(candidate: Candidate, sequences: int, free: int, host_nbytes: int, row_nbytes: int) -> Iterator[Room]:
    """Rooms with cohorts; `free` bytes of the tier that computes are for weights and for keys and values."""
    weights, cache = candidate.weights, candidate.cache
    known = {sequences}
    for kept in (weights.streaming_nbytes + device_ring(weights.shards, free), weights.nbytes):
        cohorts = _cohorts(candidate, sequences, row_nbytes)
        most = free - kept - cohorts.device_nbytes
        if most < cache.nbytes(1):
            continue
        cached = cache.sequences_in(most, sequences)
        if cached in known:
            continue
        known.add(cached)
        room = _divided(candidate, sequences, cached, free, row_nbytes)
        # Fewer sequences may be more in each cohort, whose windows are larger.
        while room.free_nbytes < weights.streaming_nbytes and room.cached > 1:
            room = _divided(candidate, sequences, room.cached - 1, free, row_nbytes)
        cohorts = room.host_kv or cohorts
        if cohorts.host_nbytes <= host_nbytes and room.free_nbytes >= weights.streaming_nbytes:
            yield room


def _divided(candidate: Candidate, sequences: int, cached: int, free_nbytes: int, row_nbytes: int) -> Room:
    """`cached` sequences where they compute and the others in cohorts, whatever is left."""
    cohorts, blocks = _cohorts(candidate, sequences - cached, row_nbytes), candidate.cache.blocks(cached)
    return Room(cached, blocks, free_nbytes - cohorts.device_nbytes - candidate.cache.nbytes_of(blocks), cohorts)


def _cohorts(candidate: Candidate, sequences: int, row_nbytes: int) -> CohortSizes:
    """Cohorts of about equal size for `sequences` at their longest."""
    cache = candidate.cache
    layer = max(count * spec.record_nbytes for spec, count in zip(cache.specs, cache.blocks(1), strict=True))
    count = -(-sequences // max(1, LAYER_NBYTES // layer))
    blocks = cache.blocks(-(-sequences // count))
    return CohortSizes.of(cache.specs, count, sequences, blocks, candidate.tokens_per_pass, row_nbytes)
