"""The worst pass a job can ask for, run once after loading: a budget that is too small shows before the first row."""

from __future__ import annotations

from ..offload.memory import host_peak
from .engine import Engine
from .errors import DoesNotFit
from .plan.job import JobShape
from .plan.planner import Plan
from .sampling.params import SamplingParams
from .sequence import Sequence


def rehearse(engine: Engine, plan: Plan, job: JobShape) -> None:
    """Fills one pass with as many prompt tokens and sampled rows as the plan allows.

    Raises DoesNotFit where the process has taken more than its budget; the engine is as new afterwards.
    """
    live = min(plan.max_sequences, plan.tokens_per_pass, job.sequences, plan.kv_sequences)
    length = max(1, min(plan.tokens_per_pass // live, job.longest - 1, plan.kv_tokens - 1))
    for _ in range(live):
        # Sampled, not greedy: that is the larger scratch.
        engine.add(Sequence([0] * length, SamplingParams(1, temperature=1.0)))
    cache = engine.scheduler.cache
    # Else the sequences would share one prompt, and the pass would not be the worst.
    cache.sharing = False
    list(engine.run())
    cache.sharing = True
    engine.start_counting()
    if (peak := host_peak()) > plan.budget_nbytes:
        raise DoesNotFit(
            f"the rehearsed pass took {peak / 2**20:,.0f} MiB and the budget is {plan.budget_nbytes / 2**20:,.0f} MiB; "
            f"nothing was run. Give --ram {-(-peak // 2**20) + 64}MiB, or a smaller --tokens-per-pass."
        )
