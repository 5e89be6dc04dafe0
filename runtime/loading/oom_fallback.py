"""An engine that goes on where memory gives out: loaded anew with less, and then with passes in parts."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ...offload.errors import is_out_of_memory
from ..engine.oom_retry import cause_of
from ..engine.scheduler import PassLimits
from ..plan.degrade import FallbackPolicy
from ..plan.plan import Plan
from .engine_loader import LoadedEngine


def load_conceding(load: Callable[[Plan], LoadedEngine], concessions: FallbackPolicy) -> LoadedEngine:
    """The engine of the first plan that memory can be had for; `load` leaves nothing allocated where it fails.

    Raises MemoryGaveOut where nothing is left to give up.
    """
    while isinstance(loaded := _attempt(load, concessions.plan), str):
        # Here, behind the handler: the error's frames held what was loaded.
        gc.collect()
        concessions.before_passes(loaded)
    engine = loaded

    def concede(cause: str, tokens: int) -> None:
        concessions.in_pass(cause, tokens)
        _apply(concessions.plan, engine)

    loaded.engine.replay.concede = concede
    return loaded


def _attempt(load: Callable[[Plan], LoadedEngine], plan: Plan) -> LoadedEngine | str:
    """The engine, or why there was no memory for it."""
    try:
        return load(plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return cause_of(error)


def _apply(plan: Plan, loaded: LoadedEngine) -> None:
    scheduler = loaded.engine.scheduler
    scheduler.limits = PassLimits(plan.tokens_per_pass, plan.max_sequences)
    if scheduler.cache.host is not None and not any(plan.parked_blocks):
        scheduler.forget_parked()
        loaded.parking.close()
