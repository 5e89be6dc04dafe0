"""A model on its way to an engine: found, planned for a workload, loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from ...moe.streaming_order import DEFAULTS, ExpertOptions
from ...offload.memory import Heap, reset_host_peak, return_memory, trim
from ..jobs.lifecycle import load_model, plan_model, profile_model
from ..loading.engine_loader import LoadedModel
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Workload
from ..settings.budgets import GIB, Budgets
from ..settings.errors import OverBudget, SettingError
from ..settings.settings import Settings
from ..source.model_source import open_source
from ..text.tokenizer import Tokenizer
from .options import EQUAL_ROWS, budgets_of, experts_of, settings_of

# A cache for the whole context of a long-context model would take most budgets, and few prompts need it.
MAX_MODEL_LEN = 4096


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
    ) -> LoadedModel:
        """Plans for `workload` and loads. The peak of host memory counts from here.

        Raises DoesNotFit, naming the smallest budget that works, SettingError, BadSize, MemoryGaveOut.
        """
        reset_host_peak()
        planned = plan_model(self.source, settings, budgets, workload)
        loaded = load_model(self.source, self.tokenizer, planned, budgets, experts)
        self._engines.callback(loaded.engine.close)
        return loaded

    def load_for_prompts(self, options: Mapping[str, Any]) -> tuple[LoadedModel, Heap]:
        """Loads by the options of an LLM for prompts that nobody knows yet, and profiles the worst pass of them.

        Returns the heap's free memory as that pass left it, too. Raises as `load`, and SettingError for sequences that
        are longer than the context.
        """
        context = self.source.shape.context
        wanted = options.get("max_model_len") or min(MAX_MODEL_LEN, context)
        if wanted > context:
            raise SettingError(f"max_model_len {wanted:,} is more than the context of {context:,}")
        workload = workload_of(options, wanted)
        loaded = self.load(settings_of(options), budgets_of(options), workload, experts_of(options))
        return loaded, self.rehearse(loaded, workload)

    def rehearse(self, loaded: LoadedModel, workload: Workload) -> Heap:
        """Runs the worst pass of the workload once. Raises DoesNotFit where a budget is too small for it.

        Returns the heap's free memory as that pass left it, to be watched while others run.
        """
        profile_model(loaded, workload)
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


def workload_of(options: Mapping[str, Any], longest: int) -> Workload:
    """What is planned for: `rows` sequences, the longest of `longest` tokens.

    The shortest is of the usual length: where memory is too small for the longest, the cache is as large as it can be.
    """
    wanted = {**EQUAL_ROWS, **options}
    output = min(wanted["output_tokens"], max(1, longest // 2))
    prompt = min(wanted["prompt_tokens"], max(1, longest - output))
    return Workload(rows := wanted["rows"], longest, min(longest, prompt + output), rows * prompt, rows * output)


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
