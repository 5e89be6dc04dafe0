"""From the files of a model to an engine that runs: plan, load, profile. Jobs, `LLM`, the server and the workers of a
cluster all go this way.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ...moe.streaming_order import DEFAULTS, ExpertOptions
from ..loading.engine_loader import LoadedModel, load_engine, load_with_fallback
from ..loading.machine_memory import MachineMemory, limit_pins, open_memory
from ..loading.prepare import store_for
from ..loading.rehearsal import Rehearsed, prompt_tokens, rehearse
from ..plan.fallback import FallbackPolicy
from ..plan.placement import Workload
from ..plan.planner import PlanResult
from ..settings.budgets import Budgets
from ..settings.settings import Settings
from ..source.model_source import ModelSource
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import MAX_TOKENS, TEXT, KeyOffsets
from .job_plan import plan_job


def plan_model(
    source: ModelSource,
    settings: Settings,
    budgets: Budgets,
    workload: Workload,
    saved: Path | None = None,
) -> tuple[MachineMemory, PlanResult]:
    """Opens the device and plans for `workload`, or takes the `saved` plan.

    Raises DoesNotFit, naming the smallest budget that works, SettingError, BadSize.
    """
    memory = open_memory(budgets, source.settle(settings), source.shape)
    return memory, plan_job(source, settings, budgets, memory.budget, workload, saved)


def load_model(
    source: ModelSource,
    tokenizer: Tokenizer,
    planned: tuple[MachineMemory, PlanResult],
    budgets: Budgets,
    experts: ExpertOptions = DEFAULTS,
    key_offsets: KeyOffsets | None = None,
) -> LoadedModel:
    """Weights into memory as planned, from a store where they do not fit; the store is made first where it is missing.

    Whoever loads it closes its engine. Raises DoesNotFit, MemoryGaveOut.
    """
    memory, chosen = planned
    limit_pins(memory.device, chosen.request.profile)
    policy = FallbackPolicy(chosen.plan, chosen.request)
    store = store_for(source, chosen.plan, budgets)
    folder = store and store.folder
    load = partial(load_engine, source, store=folder, device=memory.device, experts=experts, key_offsets=key_offsets)
    engine = load_with_fallback(load, policy)
    written = store.nbytes_written if store else 0
    return LoadedModel(source, tokenizer, memory, chosen, policy, engine, written)


def profile_model(loaded: LoadedModel, workload: Workload) -> Rehearsed:
    """Runs the worst pass of the workload once. Raises DoesNotFit where a budget is too small for it."""
    text = prompt_tokens(loaded.tokenizer.encode(TEXT)[:MAX_TOKENS], loaded.source.shape.vocab)
    shown = rehearse(loaded.engine, loaded.policy.plan, workload, text)
    loaded.engine.ledger.measure().check()
    return shown
