"""What other budgets and settings would give than a plan, and the JSON document of `moedge plan`. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from .offload.budget import GIB, gib
from .offload.machine.hardware import cpu_text, find_driver, gpu_text, num_threads
from .quant.formats.format import MIXED_FORMATS
from .runtime.plan.kernels import planned_kernels
from .runtime.plan.memory_ledger import OPTIONS
from .runtime.plan.placement import Plan
from .runtime.plan.plan_file import SCHEMA, machine_key, shape_key
from .runtime.plan.planner import PlanRequest, PlanResult, SearchSpace, solve
from .runtime.settings.errors import DoesNotFit, SettingError
from .runtime.shape.model_shape import ModelShape
from .runtime.shape.shards import SMALLEST_FORMATS, offered_formats

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
    """A change as a person would type it, the rate that it gives, how many times as fast that is, and what it costs."""

    change: str
    generated_tok_s: float
    gain: float
    note: str = ""


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
    # As many as there may be anyway change nothing.
    known = {SearchSpace(request).most_live: result}
    return [
        _point("sequences", count, known.get(count) or attempt(request.with_settings(max_sequences=count)))
        for count in counts
    ]


def by_budget(request: PlanRequest, result: PlanResult) -> list[Point]:
    """Each tier's budget from half to double in round numbers, up to what the machine has; the others as they are. Each
    point is what `solve` makes of that budget."""
    return [
        _point(tier, value, result if value == nbytes else attempt(request.with_budget(tier, value)))
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
                found.append(Suggestion(change, rate, rate / now, _cost_of(change, result.plan, better.plan)))
                break
    return sorted(found, key=lambda each: -each.gain)


# By the format of experts.
_LOSSES = {
    "int3": "it loses three to six times what int4 loses, least after prepare --calibrate",
    "vq2": "it loses eight times what int4 loses, and is useless without prepare --calibrate",
}


def _cost_of(change: str, now: Plan, then: Plan) -> str:
    """What a person should know of a change before making it."""
    if not change.startswith("--experts"):
        return ""
    smaller = f"{gib(then.weights_nbytes)} of weights instead of {gib(now.weights_nbytes)}"
    return f"{smaller}; {_LOSSES[change.rpartition(' ')[2]]} (docs/quality.md)"


def nearest(request: PlanRequest) -> list[str]:
    """Changes with which a job that does not fit would fit, one of each kind."""
    tier = next(iter(request.budget.memory))
    space = SearchSpace(request)
    fitting = []
    if attempt(request.with_budget(tier, space.smallest)):
        fitting.append(space.for_every_row)
    if request.settings.quant.partition("+")[0] not in ("auto", *SMALLEST_FORMATS) and attempt(
        request.with_settings(quant="nf4")
    ):
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
    if request.shape.num_experts and result.plan.held_nbytes < result.plan.weights_nbytes:
        mixed = [name for name in MIXED_FORMATS if name.startswith(f"{result.plan.quant}+")]
        for name in mixed:
            yield [(f"--experts {name.rpartition('+')[2]}", request.with_settings(quant=name))]
    if result.plan.kv != "int4" and request.settings.kv != "int4":
        yield [(f"--kv {kv}", request.with_settings(kv=kv)) for kv in ("int8", "int4") if kv != result.plan.kv]
    if request.settings.max_sequences is not None:
        yield [("more sequences", request.with_settings(max_sequences=None))]


def _point(varied: str, value: int, result: PlanResult | None) -> Point:
    rate, quant = (result.prediction.generated_tok_s, result.plan.quant) if result else (None, None)
    return Point(varied, value, rate, quant)


def document(
    name: str,
    result: PlanResult,
    points: list[Point],
    suggestions: list[Suggestion],
    left_out: int,
    download: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The document of a plan for the model `name`. `left_out` rows may need more tokens than the plan's cache takes.

    `download` has the `nbytes` of a checkpoint that is not here, and the bytes `free` where it would go.
    """
    request, hosted = result.request, result.plan.host_kv
    loading = request.costs.loading(result.plan, request.workload, request.prepared)
    assert request.hardware is not None
    return {
        "schema": SCHEMA,
        "version": version("moedge"),
        "fits": True,
        "model": _model(name, request.shape),
        "machine": {
            "key": machine_key(request.hardware),
            "hardware": asdict(request.hardware),
            "measured": request.costs.rates.measured,
            "preset": request.preset or None,
            "computes": computes_on(request),
        },
        "download": download,
        "job": asdict(request.workload),
        "left_out": {"rows": left_out, "takes": SearchSpace(request).for_every_row} if left_out else None,
        "settings": asdict(request.settings),
        "tiers": [tier.as_json() for tier in result.ledger.tiers.values()],
        "plan": result.plan.as_dict(),
        "kernels": asdict(planned_kernels(result.plan, request.shape)),
        "prediction": result.prediction.as_dict(),
        "loading": asdict(loading),
        "formats": dict(result.seconds),
        "points": [asdict(point) for point in points],
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
        "without_host_kv": _without(result, hosted, host_kv="off"),
        "without_cpu_experts": _without(result, result.plan.cpu_experts, cpu_experts="off"),
        "without_cpu_attention": _without(result, hosted and hosted.rows_nbytes, cpu_attention="off"),
    }


def _without(result: PlanResult, used: object, **off: str) -> float | None:
    """Generated tokens per second with that turned off; None where it is not used, or nothing fits without."""
    other = attempt(result.request.with_settings(**off)) if used else None
    return None if other is None else other.prediction.generated_tok_s


def refusal(name: str, request: PlanRequest, reason: str, fitting: list[str]) -> dict[str, Any]:
    """The document of a job that does not fit; `fitting` are changes with which it would."""
    return {
        "schema": SCHEMA,
        "version": version("moedge"),
        "fits": False,
        "model": _model(name, request.shape),
        "reason": reason,
        "nearest": fitting,
    }


def computes_on(request: PlanRequest) -> str:
    """Which device computes, and why not a GPU where none does."""
    device, hardware = request.budget.device, request.hardware
    assert hardware is not None
    if device is not None:
        return gpu_text(device.nbytes, hardware.gpus[0] if hardware.gpus else None)
    if hardware.gpus:
        reason = "--gpu-mem 0"
    elif request.elsewhere:
        reason = "that machine has no NVIDIA GPU"
    else:
        reason = "no NVIDIA driver found" if find_driver() is None else "the NVIDIA driver shows no GPU to this process"
    return cpu_text(hardware.cores if request.elsewhere else num_threads(), reason)


def _model(name: str, shape: ModelShape) -> dict[str, Any]:
    experts = [layer.experts for layer in shape.layers if layer.experts]
    return {
        "layers": len(shape.layers),
        "experts": sum(each.count for each in experts),
        "experts_per_layer": max((each.count for each in experts), default=0),
        "experts_per_token": max((each.per_token for each in experts), default=0),
        "name": name,
        "key": shape_key(shape),
        "type": shape.model_type,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
    }
