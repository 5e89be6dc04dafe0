"""The same request with other sequences, budgets and formats: what would change, and what would help. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import GIB
from ..shape.shards import SMALLEST_FORMATS, offered_formats
from .memory_ledger import OPTIONS
from .planner import PlanRequest, PlanResult, SearchSpace, solve

# Budgets are shown in these shares of what is granted, and a suggestion is worth showing from this gain on.
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
WORTH_SHOWING = 1.05
# GiB more memory that suggestions try, by tier.
STEPS = (1, 4, 16)
SHORTER = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One variation: what was varied to which number, and the rate of its own best plan and the format of its weights;
    None means that it does not fit."""

    varied: str
    value: int
    generated_tok_s: float | None
    quant: str | None


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change as a person would type it, the rate that it gives, and how many times as fast that is."""

    change: str
    generated_tok_s: float
    gain: float


def attempt(request: PlanRequest) -> PlanResult | None:
    """None where the request does not fit or contradicts itself."""
    try:
        return solve(request)
    except (DoesNotFit, SettingError):
        return None


def by_sequences(request: PlanRequest, result: PlanResult) -> list[Point]:
    """Speed by number of sequences, from one to twice the plan's, each with the best other choices."""
    most = min(request.workload.sequences, 2 * result.plan.max_sequences)
    counts = sorted({1 << power for power in range(0, most.bit_length(), 2)} | {result.plan.max_sequences, most})
    return [_point("sequences", count, request.with_settings(max_sequences=count)) for count in counts]


def by_budget(request: PlanRequest) -> list[Point]:
    """Each tier's budget from half to double in round numbers, up to what the machine has; the others as they are. Each
    point is what `solve` makes of that budget."""
    return [
        _point(tier, value, request.with_budget(tier, value))
        for tier, nbytes in request.budget.memory.items()
        for value in sorted({nbytes, *(_round(share * nbytes) for share in SHARES)})
        if value <= most_of(request, tier)
    ]


def most_of(request: PlanRequest, tier: str) -> float:
    """The most bytes that a budget of a tier may be: what the machine has; of another machine, any RAM."""
    hardware = request.hardware
    if hardware is None or (tier == "host" and request.elsewhere):
        return math.inf
    return hardware.ram_nbytes if tier == "host" else hardware.gpus[0].nbytes


def _round(nbytes: float) -> int:
    """Down to a size as a person would give it: whole GiB, half ones below 4, 64 MiB below 2."""
    step = GIB if nbytes >= 4 * GIB else GIB // 2 if nbytes >= 2 * GIB else GIB // 16
    return max(GIB // 16, int(nbytes // step) * step)


def suggestions(request: PlanRequest, result: PlanResult) -> list[Suggestion]:
    """The cheapest change of each kind that helps: the first step of memory that does, formats from exact on."""
    now = result.prediction.generated_tok_s
    found = []
    for changes in _changes(request, result):
        for change, other in changes:
            better = attempt(other)
            if better and better.prediction.generated_tok_s >= WORTH_SHOWING * now:
                rate = better.prediction.generated_tok_s
                found.append(Suggestion(change, rate, rate / now))
                break
    return sorted(found, key=lambda each: -each.gain)


def nearest(request: PlanRequest) -> list[str]:
    """Changes with which a job that does not fit would fit, one of each kind."""
    tier = next(iter(request.budget.memory))
    space = SearchSpace(request)
    fitting = []
    if attempt(request.with_budget(tier, space.smallest)):
        fitting.append(space.for_every_row)
    if request.settings.quant not in ("auto", *SMALLEST_FORMATS) and attempt(request.with_settings(quant="nf4")):
        fitting.append("--quant nf4")
    shorter = request.workload.longest
    while shorter > SHORTER:
        shorter //= SHORTER
        workload = replace(request.workload, longest=shorter, shortest=None, prompt_tokens=None, generated_tokens=None)
        if attempt(replace(request, workload=workload)):
            fitting.append(f"rows of at most {shorter:,} tokens")
            break
    if request.budget.device and attempt(replace(request, budget=replace(request.budget, device=None))):
        fitting.append("--gpu-mem 0")
    return fitting


def _changes(request: PlanRequest, result: PlanResult) -> Iterator[list[tuple[str, PlanRequest]]]:
    """Kinds of changes, each from its smallest step on."""
    for tier, nbytes in request.budget.memory.items():
        yield [
            (f"+{step} GiB {OPTIONS[tier].removeprefix('--')}", request.with_budget(tier, nbytes + step * GIB))
            for step in STEPS
            if nbytes + step * GIB <= most_of(request, tier)
        ]
    if request.settings.compute != "int8":
        offered = offered_formats(request.shape)
        lossier = offered[offered.index(result.plan.quant) + 1 :] if result.plan.quant in offered else ()
        yield [(f"--quant {quant}", request.with_settings(quant=quant)) for quant in lossier]
    if result.plan.kv != "int4" and request.settings.kv != "int4":
        yield [(f"--kv {kv}", request.with_settings(kv=kv)) for kv in ("int8", "int4") if kv != result.plan.kv]
    if request.settings.max_sequences is not None:
        yield [("more sequences", request.with_settings(max_sequences=None))]


def _point(varied: str, value: int, request: PlanRequest) -> Point:
    result = attempt(request)
    if result is None:
        return Point(varied, value, None, None)
    return Point(varied, value, result.prediction.generated_tok_s, result.plan.quant)
