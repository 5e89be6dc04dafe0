"""The fallbacks that a job applies, one at a time and in a fixed order, where memory runs out in spite of its plan.
Torch-free.

1. Keys and values in host memory: cohorts, halved down to none. As many sequences run together as there are blocks for.
2. Prefetch depth: slots for experts in flight, halved down to the least that works. The job waits longer for weights.
3. Sequences together, halved down to one; in a pass, whose cache stays as it is, its tokens. The job takes more passes.
4. Blocks of host memory for preempted sequences. The job computes these sequences again.

No answer depends on them. The result of each step is again a plan, with all of its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..kv.cohorts import CohortSizes
from ..kv.spec import KVSpec, StateSpec, state_format
from ..settings.errors import MemoryGaveOut
from ..settings.settings import Settings
from ..shape.shards import model_shards
from .candidate import CacheSize
from .placement import MIN_RING_EXPERTS, Plan, largest_expert
from .planner import PlanRequest, SearchSpace


@dataclass(frozen=True, slots=True)
class Fallback:
    """The plan had `before` of `what`, and `after` are left: experts in flight, sequences, tokens of a pass, cohorts in
    host memory, parked blocks. `cause` is what the allocator said."""

    what: str
    before: int
    after: int
    cause: str

    def __str__(self) -> str:
        return f"out of memory ({self.cause}): {self.what} {self.before:,} -> {self.after:,}"


class _Given(NamedTuple):
    what: str
    before: int
    after: int
    plan: Plan


class FallbackPolicy:
    """`plan` is what is left of the first plan for `request`; `applied` lists the fallbacks that led to it."""

    def __init__(self, plan: Plan, request: PlanRequest) -> None:
        self.plan = plan
        self.applied: list[Fallback] = []
        self._request = request
        shape = request.shape
        specs = tuple(KVSpec(group, plan.kv, plan.kv_block) for group in shape.kv_groups)
        self._states = StateSpec(shape.state_groups, plan.dtype, state_format(plan.kv, plan.deterministic))
        self._cache = CacheSize(specs, min(request.workload.longest, plan.kv_tokens), plan.tokens_per_pass)
        self._expert = largest_expert(model_shards(shape, plan.quant, plan.dtype))

    def before_passes(self, cause: str) -> None:
        """Applies the next fallback before the model is loaded again. Raises MemoryGaveOut where none is left."""
        self._step(cause, self._hosted, self._prefetch, self._sequences, self._parked)

    def in_pass(self, cause: str, tokens: int) -> None:
        """Applies the next fallback in a pass of `tokens`; ring and cache keep their size.

        Raises MemoryGaveOut where none is left.
        """
        self._step(cause, lambda: self._tokens(tokens), self._parked)

    def _step(self, cause: str, *steps: Callable[[], _Given | None]) -> None:
        for step in steps:
            if given := step():
                self.plan = given.plan
                self.applied.append(Fallback(given.what, given.before, given.after, cause))
                return
        raise MemoryGaveOut(
            f"out of memory ({cause}), and no fallback is left. This job needs at least {self._least()}: "
            "free that much; the same command resumes the job"
        )

    def _least(self) -> str:
        """The smallest budget, in the formats that the job has."""
        plan = self.plan
        settings = Settings(
            dtype=plan.dtype, quant=plan.quant, kv=plan.kv, deterministic=plan.deterministic, compute=plan.compute
        )
        return SearchSpace(replace(self._request, settings=settings)).for_every_row

    def _hosted(self) -> _Given | None:
        """First, because page-locked memory is what machines refuse most often."""
        if (sizes := self.plan.host_kv) is None:
            return None
        after = sizes.count // 2
        each = -(-sizes.sequences // sizes.count)
        left = CohortSizes.of(self._cache.specs, after, each * after, sizes.blocks, self.plan.tokens_per_pass)
        left = replace(left, rows_nbytes=sizes.rows_nbytes)
        plan = replace(self.plan, host_kv=left if after else None)
        return _Given("cohorts in host memory", sizes.count, after, plan)

    def _prefetch(self) -> _Given | None:
        """Afterwards a device's ring and the ring in the host that feeds it have the same size."""
        staging = self.plan.staging
        placements = (self.plan.placement, *([staging.placement] if staging else []))
        rings = [placement.expert_ring // max(1, self._expert) for placement in placements]
        before, after = max(rings), max(MIN_RING_EXPERTS, max(rings) // 2)
        if after >= before:
            return None
        most = after * self._expert
        placement = replace(self.plan.placement, expert_ring=min(most, self.plan.placement.expert_ring))
        plan = replace(self.plan, placement=placement)
        if staging is not None:
            ring = min(most, staging.placement.expert_ring)
            kept = replace(staging, placement=replace(staging.placement, expert_ring=ring))
            plan = replace(plan, staging=kept)
        return _Given("experts in flight", before, after, plan)

    def _sequences(self) -> _Given | None:
        before = max(self.plan.max_sequences, self.plan.kv_sequences)
        if before == 1:
            return None
        live, cached = max(1, self.plan.max_sequences // 2), max(1, self.plan.kv_sequences // 2)
        blocks = self._cache.blocks(cached)
        whole = [
            count * self.plan.kv_block
            for count, spec in zip(blocks, self._cache.specs, strict=True)
            if spec.group.window is None
        ]
        plan = replace(
            self.plan,
            max_sequences=live,
            kv_sequences=cached,
            states_nbytes=self._states.pool_nbytes(live),
            kv_blocks=blocks,
            kv_nbytes=self._cache.nbytes_of(blocks),
            kv_tokens=min(whole, default=self.plan.kv_tokens),
            parked_blocks=tuple(map(min, self.plan.parked_blocks, blocks)),
        )
        return _Given("sequences", before, max(live, cached), plan)

    def _tokens(self, tokens: int) -> _Given | None:
        after = tokens // 2
        if after < self.plan.prompt_cut:
            return None
        live = min(after, self.plan.max_sequences)
        return _Given("tokens of a pass", tokens, after, replace(self.plan, tokens_per_pass=after, max_sequences=live))

    def _parked(self) -> _Given | None:
        before = sum(self.plan.parked_blocks)
        if not before:
            return None
        return _Given("parked blocks", before, 0, replace(self.plan, parked_blocks=(0,) * len(self.plan.parked_blocks)))
