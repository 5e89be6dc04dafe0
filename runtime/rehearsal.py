"""The worst pass a job can ask for, run once after loading: a budget that is too small shows before the first row."""

from __future__ import annotations

from ..offload.memory import host_peak
from .engine import Engine
from .errors import DoesNotFit
from .metrics import Metrics
from .plan.planner import JobShape, Plan
from .sampling.params import SamplingParams
from .sequence import Sequence


def rehearse(engine: Engine, plan: Plan, job: JobShape) -> None:
    """Fills one pass with as many prompt tokens and sampled rows as the plan allows.

    Raises DoesNotFit where the process has taken more than its budget; the engine is as new afterwards.
    """
    live = min(plan.max_sequences, plan.tokens_per_pass, job.sequences, plan.kv_tokens // job.longest)
    length = max(1, min(plan.tokens_per_pass // live, job.longest - 1))
    for _ in range(live):
        # Sampled, not greedy: that is the larger scratch.
        engine.add(Sequence([0] * length, SamplingParams(1, temperature=1.0)))
    list(engine.run())
    engine.metrics = Metrics()
    if (peak := host_peak()) > plan.budget_nbytes:
        raise DoesNotFit(
            f"the rehearsed pass took {peak / 2**20:,.0f} MiB and the budget is {plan.budget_nbytes / 2**20:,.0f} MiB; "
            f"nothing was run. Give --ram {-(-peak // 2**20) + 64}MiB, or a smaller --tokens-per-pass."
        )
