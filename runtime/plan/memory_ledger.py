"""The memory of a run, arena by arena: the bytes that the plan gives it, what was allocated, and the peaks. Torch-free.

The planner makes a ledger, the loader records what it allocates. The output of `moedge plan`, the check after the
rehearsal, the run's summary and the check against the budgets read it and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from ...offload.memory import host_peak
from ..kv.spec import KVSpec
from ..settings.errors import DoesNotFit
from ..settings.settings import MIB
from ..shape.model_shape import ModelShape
from ..shape.shards import copied_nbytes, resident_nbytes
from .placement import LOADING_NBYTES, Plan

OPTIONS = {"device": "--gpu-mem", "host": "--ram", "disk": "--disk"}
# Arenas that the loader allocates; the planned bytes of the others are bounds.
WEIGHTS, RINGS, KV_CACHE = "weights held", "rings of streamed weights", "KV cache"
STAGED, PARKED, WORKSPACE = "weights staged for the device", "parked blocks", "scratch of products"
STATES, FUSED, GRAPHS = "states of recurrent layers", "buffers of fused layers", "CUDA graphs"
HOST_KV, WINDOWS = "KV cache in host memory", "windows to KV in host memory"
TOKENIZER = "tokenizing a prompt"
CPU_EXPERTS = "rows of experts on the CPU"
# What malloc keeps of what loading and passes freed (offload/memory.py); a bound.
KEPT = "kept for the next pass"


@dataclass(slots=True)
class Arena:
    """Bytes by plan, and those that were allocated: None where nothing recorded them."""

    planned: int
    actual: int | None = None


@dataclass(slots=True)
class TierLedger:
    """One tier: its budget (None: none), its arenas by name, and its peak in bytes (None: not measured)."""

    tier: str
    budget: int | None
    arenas: dict[str, Arena] = field(default_factory=dict)
    peak: int | None = None

    @property
    def planned(self) -> int:
        """Bytes of all arenas by plan."""
        return sum(arena.planned for arena in self.arenas.values())

    @property
    def over_budget(self) -> bool:
        """Whether the peak was over the budget."""
        return self.budget is not None and self.peak is not None and self.peak > self.budget

    def as_json(self) -> dict[str, Any]:
        """The planned bytes, for `moedge plan`."""
        parts = {name: arena.planned for name, arena in self.arenas.items()}
        return {"tier": self.tier, "budget": self.budget, "parts": parts}


@dataclass(slots=True)
class MemoryLedger:
    """Every arena of every tier; the tier that computes comes first, the disk last.

    `device_peak` reads the most GPU memory that this process took; it is None where the CPU computes.
    """

    tiers: dict[str, TierLedger]
    device_peak: Callable[[], int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, plan: Plan, shape: ModelShape, device_peak: Callable[[], int] | None = None) -> Self:
        """The planned bytes of `plan` for a model of `shape`."""
        budget = plan.budget
        disk = TierLedger("disk", budget.disk_nbytes, {"store of weights": Arena(_store_nbytes(plan, shape))})
        if budget.device is None:
            tiers = [TierLedger("host", budget.host_nbytes, _computing(plan, "process")), disk]
        else:
            device = TierLedger("device", budget.device.nbytes, _computing(plan, "context and libraries"))
            tiers = [device, TierLedger("host", budget.host_nbytes, _staging(plan, shape)), disk]
        return cls({tier.tier: tier for tier in tiers}, device_peak)

    def record(self, tier: str, arena: str, nbytes: int) -> None:
        """`nbytes` were allocated for an arena. Raises KeyError for one that the plan does not list."""
        self.tiers[tier].arenas[arena].actual = nbytes

    @property
    def computing(self) -> TierLedger:
        """The tier that computes."""
        return next(iter(self.tiers.values()))

    @property
    def allocated(self) -> Iterator[tuple[str, str, Arena]]:
        """Tier, name and bytes of the arenas that were recorded."""
        for tier in self.tiers.values():
            yield from ((tier.tier, name, arena) for name, arena in tier.arenas.items() if arena.actual is not None)

    def measure(self) -> Self:
        """Takes the peaks of this process so far, and returns the ledger."""
        self.tiers["host"].peak = host_peak()
        if "device" in self.tiers and self.device_peak is not None:
            self.tiers["device"].peak = self.device_peak()
        return self

    @property
    def over_budget(self) -> list[TierLedger]:
        """Tiers whose peak was over their budget."""
        return [tier for tier in self.tiers.values() if tier.over_budget]

    def check(self) -> None:
        """Raises DoesNotFit, naming the budget that would do, where a tier's peak is over its budget."""
        for tier in self.over_budget:
            peak, budget = tier.peak or 0, tier.budget or 0
            raise DoesNotFit(
                f"the rehearsed pass took {peak / MIB:,.0f} MiB and the budget is {budget / MIB:,.0f} MiB; "
                f"nothing was run. Give {OPTIONS[tier.tier]} {-(-peak // MIB) + 64}MiB, or a smaller --tokens-per-pass."
            )


def _computing(plan: Plan, process: str) -> dict[str, Arena]:
    """The arenas of the tier that computes."""
    states = {STATES: Arena(plan.states_nbytes)} if plan.states_nbytes else {}
    kept = {KEPT: Arena(plan.kept_nbytes)} if plan.kept_nbytes else {}
    fused = {FUSED: Arena(plan.fused_nbytes)} if plan.fused_nbytes else {}
    graphs = {GRAPHS: Arena(plan.graphs_nbytes)} if plan.graphs_nbytes else {}
    return {
        process: Arena(plan.process_nbytes),
        "small parameters": Arena(plan.resident_nbytes),
        **({TOKENIZER: Arena(plan.encoder_nbytes)} if plan.budget.device is None else {}),
        WORKSPACE: Arena(plan.workspace_nbytes),
        "activations": Arena(plan.activations_nbytes),
        "slack of allocators": Arena(plan.slack_nbytes),
        **kept,
        **fused,
        **graphs,
        KV_CACHE: Arena(plan.kv_nbytes),
        **({WINDOWS: Arena(plan.host_kv.device_nbytes)} if plan.host_kv else {}),
        **states,
        WEIGHTS: Arena(plan.held_nbytes),
        RINGS: Arena(plan.placement.ring_nbytes),
    }


def _staging(plan: Plan, shape: ModelShape) -> dict[str, Arena]:
    """The host's arenas where a device computes."""
    assert plan.staging is not None
    assert plan.budget.device is not None
    specs = (KVSpec(group, plan.kv, plan.kv_block) for group in shape.kv_groups)
    parked = sum(count * spec.block_nbytes for count, spec in zip(plan.parked_blocks, specs, strict=True))
    return {
        "process": Arena(plan.budget.device.process_nbytes),
        "small parameters": Arena(resident_nbytes(shape, plan.dtype)),
        # Beyond what prompts are tokenized in, once loading is over.
        "loading": Arena(max(0, LOADING_NBYTES - plan.encoder_nbytes)),
        TOKENIZER: Arena(plan.encoder_nbytes),
        STAGED: Arena(plan.staging.staged_nbytes),
        RINGS: Arena(plan.staging.placement.ring_nbytes),
        PARKED: Arena(parked),
        **({HOST_KV: Arena(plan.host_kv.host_nbytes)} if plan.host_kv else {}),
        **({CPU_EXPERTS: Arena(plan.cpu_experts_nbytes)} if plan.cpu_experts else {}),
    }


def _store_nbytes(plan: Plan, shape: ModelShape) -> int:
    """Bytes of the store of all weights, where some stay on disk and the checkpoint's files do not serve for it."""
    on_disk = plan.weights_nbytes - plan.held_nbytes if plan.staging is None else plan.staging.disk_nbytes
    return copied_nbytes(shape, plan.quant, plan.dtype) if on_disk else 0
