"""A plan as a file, `moedge.plan/4`: what was asked, what was chosen, what it rests on. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...offload.machine.hardware import Hardware, cpu_text, find_driver, gpu_text, num_threads
from ...quant.kernels.gpu import Lacks
from ..settings.errors import SettingError
from ..settings.settings import GIB, Settings
from ..shape.model_shape import ModelShape
from .history import machine_key, shape_key
from .kernels import planned_kernels
from .memory_ledger import OPTIONS, MemoryLedger
from .placement import Plan
from .planner import PlanRequest, PlanResult, SearchSpace
from .what_if import Point, Suggestion

SCHEMA = "moedge.plan/4"
# Settings whose value in a plan must be the one that a job asks for.
_FIXED = ("dtype", "quant", "kv", "compute", "deterministic", "tokens_per_pass", "max_sequences")


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
    request = result.request
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
    }


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


def load_plan(path: Path, request: PlanRequest) -> Plan:
    """The plan in a file, for the request's model, machine, settings and budget.

    Raises SettingError where it was made for something else, or needs more memory than there is now.
    """
    assert request.hardware is not None
    content = read_plan_file(path)
    _refuse_other(path, content, request.shape, request.hardware)
    plan = Plan.from_json(content["plan"])
    _refuse_other_settings(path, plan, request.settings)
    _refuse_other_tiers(plan, request)
    return _within(plan, request)


def _refuse_other(path: Path, content: dict[str, Any], shape: ModelShape, hardware: Hardware) -> None:
    for what, found, wanted in (
        ("model", content["model"]["key"], shape_key(shape)),
        ("machine", content["machine"]["key"], machine_key(hardware)),
    ):
        if found != wanted:
            raise SettingError(f"{path} was made for another {what}; make one for this with `moedge plan --save`")


def _refuse_other_settings(path: Path, plan: Plan, settings: Settings) -> None:
    for name in _FIXED:
        wanted, planned = getattr(settings, name), getattr(plan, name)
        if wanted not in ("auto", None, planned):
            option = name.replace("_", "-")
            raise SettingError(f"{path} has {option} {planned}, and {wanted} was asked for; drop one of them")


def _refuse_other_tiers(plan: Plan, request: PlanRequest) -> None:
    if (plan.budget.device is None) != (request.budget.device is None):
        raise SettingError("the plan computes on another tier than this run would; give its --gpu-mem, or a new plan")
    if request.budget.device is not None:
        _refuse_missing_kernels(plan, request.budget.device.gpu.lacks)


def _within(plan: Plan, request: PlanRequest) -> Plan:
    """The plan within what is granted now. Raises SettingError where it uses more than that."""
    # What passes may keep is no need.
    spare, plan = plan.kept_nbytes + plan.free_nbytes, replace(plan, kept_nbytes=0)
    ledger, granted = MemoryLedger.of(plan, request.shape), request.budget.memory
    budget = plan.budget
    for tier, nbytes in granted.items():
        used = ledger.tiers[tier].planned
        if used > nbytes:
            raise SettingError(
                f"the plan uses {used / GIB:.2f} GiB of {tier} memory and {nbytes / GIB:.2f} GiB are granted now; make "
                f"a new plan, or grant that much with {OPTIONS[tier]}"
            )
        budget = budget.with_tier(tier, min(nbytes, budget.memory[tier]))
    store = ledger.tiers["disk"].planned
    limit, there = request.budget.disk_nbytes, request.prepared.nbytes.get(plan.quant, 0)
    if limit is not None and store and store > limit + there:
        raise SettingError(
            f"the plan keeps {store / GIB:.2f} GiB of prepared weights on disk, and --disk and the free space allow "
            f"{max(0, limit + there) / GIB:.2f} GiB now; make a new plan, or free some space"
        )
    spare, plan = max(0, spare - (plan.budget.host_nbytes - budget.host_nbytes)), replace(plan, budget=budget)
    return plan.with_spare(spare) if plan.staging is None else replace(plan, free_nbytes=spare)


def _refuse_missing_kernels(plan: Plan, lacks: Lacks) -> None:
    wanted = {"attention": plan.attention == "triton", "cache": plan.stores_by_kernel, "experts": plan.grouped_experts}
    for family, reason in lacks.reasons.items():
        if wanted[family]:
            raise SettingError(f"the plan takes the GPU's kernels for {family}. {reason}. Make a new plan without them")


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


def read_plan_file(path: Path) -> dict[str, Any]:
    """The document that `moedge plan --save` wrote. Raises SettingError for anything else."""
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA or not content["fits"]:
            raise ValueError
        Plan.from_json(content["plan"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise SettingError(f"{path} holds no plan ({SCHEMA}); `moedge plan MODEL --save FILE` writes one") from None
    found: dict[str, Any] = content
    return found
