"""How a candidate's sequences are divided between a device and host memory. Torch-free.

A byte of keys and values that a device holds saves a byte of its link in every pass, as a byte of weights does that
every pass wants; so the device first takes what a pass cannot do without, then sequences, then weights; or all weights
and then sequences. The rest of the sequences are cohorts in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..kv.cohorts import LAYER_NBYTES, CohortSizes
from ..kv.spec import KVSpec
from .candidate import Candidate
from .placement import Workload, device_ring

# Of the blocks that sequences use in the mean: so many are enough (bench/results/streaming.md, "Spare blocks").
SPARE_BLOCKS = 1.1


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
    known, cohorts = {sequences}, _cohorts(candidate, sequences, row_nbytes)
    for kept in (weights.streaming_nbytes + device_ring(weights.shards, free), weights.nbytes):
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
        if (room.host_kv or cohorts).host_nbytes <= host_nbytes and room.free_nbytes >= weights.streaming_nbytes:
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


def needed(candidate: Candidate, workload: Workload) -> tuple[Room, bool]:
    """The room of sequences at their longest in which all live ones of a candidate run together, as they use their
    blocks, with its bytes as less than none free; and whether all then do."""
    live, longest, specs = candidate.live, candidate.cache.longest, candidate.cache.specs
    used = min(longest, round(used_tokens(workload, live, candidate.tokens_per_pass)))
    # Windows are full long before a sequence ends, and would ask for all blocks of the other layers, too.
    whole = [spec for spec in specs if spec.group.window is None] or specs
    share = max(spec.least_blocks(max(1, used)) / spec.least_blocks(longest) for spec in whole)
    cached = max(1, min(live, math.ceil(SPARE_BLOCKS * live * share)))
    blocks = candidate.cache.blocks(cached)
    running = live_sequences(specs, blocks, live, workload, candidate.tokens_per_pass)
    room = Room(cached, blocks, -candidate.fixed - candidate.cache.nbytes_of(blocks))
    return room, running >= min(live, workload.sequences)


def live_sequences(
    specs: Sequence[KVSpec], blocks: Sequence[int], most: int, job: Workload, tokens_per_pass: int
) -> float:
    """Sequences that run together: as many as a pass takes at `most` and the cache's blocks allow, as they use them."""
    live = 1.0
    # The more there are, the longer their prompts take, and the further apart they begin.
    for _ in range(3):
        tokens = max(1, round(used_tokens(job, live, tokens_per_pass)))
        fitting = [count / spec.least_blocks(tokens) for spec, count in zip(specs, blocks, strict=True)]
        live = max(live, min(most, job.sequences, *fitting))
    return live


def used_tokens(job: Workload, live: float, tokens_per_pass: int) -> float:
    """Tokens of a sequence in the cache, in the mean over `live` ones when together they hold most.

    Blocks are given as a sequence grows. Sequences whose prompts are computed one after the other end one after the
    other, so that they are never all at their longest.
    """
    apart = min(passes_with_prompts(job, live, tokens_per_pass), job.mean_generated)
    return job.mean_prompt + job.mean_generated - apart / 2


def passes_with_prompts(job: Workload, live: float, tokens_per_pass: int) -> float:
    """Passes of one round. They are full; where prompts are long, all are, and a round takes longer than an answer."""
    prompts, free = job.mean_prompt * live, max(0.0, tokens_per_pass - live)
    if prompts <= job.mean_generated * free:
        return max(1.0, prompts / max(1.0, free))
    return (prompts + job.mean_generated * live) / tokens_per_pass
