"""A model on its way to an engine: found, planned for a workload, loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Self

from ...moe.streaming_mode import DEFAULTS, ExpertOptions
from ...offload.memory import Heap, reset_host_peak, return_memory, trim
from ..jobs.job_plan import plan_job
from ..loading.engine_loader import LoadedModel, load_engine, load_with_fallback
from ..loading.machine_memory import limit_pins, open_memory
from ..loading.prepare import store_for
from ..loading.rehearsal import prompt_tokens, rehearse
from ..plan.fallback import FallbackPolicy
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Workload
from ..settings.budgets import GIB, Budgets
from ..settings.errors import OverBudget
from ..settings.settings import Settings
from ..source.model_source import open_source
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import MAX_TOKENS, TEXT


class OpenModel:
    """A checkpoint folder, a store or a hub id, with its tokenizer. Closing it also closes the engines it loaded."""

    def __init__(self, name: str) -> None:
        with ExitStack() as resources:
            self.source = resources.enter_context(open_source(name))
            self.tokenizer = resources.enter_context(Tokenizer.load(self.source.folder))
            self._engines = resources.enter_context(ExitStack())
            self._resources = resources.pop_all()

    def load(
        self,
        settings: Settings,
        budgets: Budgets,
        workload: Workload,
        experts: ExpertOptions = DEFAULTS,
        *,
        any_kernel: bool = False,
    ) -> LoadedModel:
        """Plans for `workload` and loads. The peak of host memory counts from here.

        `any_kernel` uses kernels of the CPU even if they are wrong on the model's widths.

        Raises DoesNotFit, naming the smallest budget that works, SettingError, BadSize, MemoryGaveOut.
        """
        reset_host_peak()
        source = self.source
        memory = open_memory(budgets, source.settle(settings), source.shape)
        chosen = plan_job(source, settings, budgets, memory.budget, workload, any_kernel=any_kernel)
        limit_pins(memory.device, chosen.request.profile)
        stored, policy = store_for(source, chosen.plan, budgets), FallbackPolicy(chosen.plan, chosen.request)
        store = stored and stored.folder
        engine = load_with_fallback(lambda plan: load_engine(source, plan, store, memory.device, experts), policy)
        self._engines.callback(engine.close)
        return LoadedModel(source, self.tokenizer, memory, chosen, policy, engine)

    def rehearse(self, loaded: LoadedModel, workload: Workload) -> Heap:
        """Runs the worst pass of the workload once. Raises DoesNotFit where a budget is too small for it.

        Returns the heap's free memory as that pass left it, to be watched while others run.
        """
        text = self.tokenizer.encode(TEXT)[:MAX_TOKENS]
        rehearse(loaded.engine, loaded.policy.plan, workload, prompt_tokens(text, self.source.shape.vocab))
        loaded.engine.ledger.measure().check()
        return Heap()

    def close(self) -> None:
        """Frees every tier, as far as nobody else holds what was loaded."""
        self._resources.close()
        self.close_engines()

    def close_engines(self) -> None:
        """The same, and leaves the files open."""
        self._engines.close()
        return_memory()
        # An engine is a circle of modules.
        gc.collect()
        trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_TIERS = {"host": "RAM", "device": "GPU memory"}


def refuse_over_budget(tiers: Iterable[TierLedger], result: object) -> None:
    """Raises OverBudget with `result`, for which the work was done, where `tiers` used more than their budgets."""
    for tier in tiers:
        peak, budget = (tier.peak or 0) / GIB, (tier.budget or 0) / GIB
        raise OverBudget(
            f"{peak:.2f} GiB of {_TIERS[tier.tier]} were used, and the budget is {budget:.2f} GiB; the finished work "
            "is this error's `result`. Give a larger budget, or a smaller tokens_per_pass",
            result,
        )
