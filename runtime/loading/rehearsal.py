"""The worst pass a job can ask for, run once after loading: a budget that is too small shows before the first row."""

from __future__ import annotations

from ...offload.memory import host_peak
from ..engine.sequence import Sequence
from ..plan.plan import Plan, Workload
from ..sampling.params import SamplingParams
from ..settings.errors import DoesNotFit
from .engine_loader import LoadedEngine


def rehearse(loaded: LoadedEngine, plan: Plan, job: Workload) -> None:
    """Fills one pass with as many prompt tokens and sampled rows as the plan allows.

    Raises DoesNotFit where the process has taken more than its budgets; the engine is as new afterwards.
    """
    engine = loaded.engine
    live = min(plan.max_sequences, plan.tokens_per_pass, job.sequences)
    length = max(1, min(plan.tokens_per_pass // live, job.longest - 1, plan.kv_tokens * plan.kv_sequences // live - 1))
    for _ in range(live):
        # Sampled, not greedy: that is the larger scratch.
        engine.add(Sequence([0] * length, SamplingParams(1, temperature=1.0)))
    cache = engine.scheduler.cache
    # Else the sequences would share one prompt, and the pass would not be the worst.
    cache.sharing = False
    list(engine.run())
    cache.sharing = True
    engine.start_counting()
    loaded.streamed.start_counting()
    _check("--ram", host_peak(), plan.budget_nbytes)
    if loaded.device is not None and plan.device is not None:
        _check("--gpu-mem", loaded.device.peak, plan.device.budget_nbytes)


def _check(option: str, peak: int, budget: int) -> None:
    if peak > budget:
        raise DoesNotFit(
            f"the rehearsed pass took {peak / 2**20:,.0f} MiB and the budget is {budget / 2**20:,.0f} MiB; "
            f"nothing was run. Give {option} {-(-peak // 2**20) + 64}MiB, or a smaller --tokens-per-pass."
        )
