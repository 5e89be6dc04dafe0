"""A plan as a file, `moedge.plan/1`: what was asked, what was chosen, what it rests on. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...offload.machine.hardware import Hardware
from ...quant.kernels.gpu import Lacks
from ..settings.errors import SettingError
from ..shape.model_shape import ModelShape
from .history import machine_key, shape_key
from .placement import DevicePlan, Placement
from .plan import Plan, Settings
from .planner import Choice
from .tiers_used import used_by_tier
from .what_if import PlanRequest, Point, Suggestion

SCHEMA = "moedge.plan/1"
# Settings whose value in a plan must be the one that a job asks for.
_FIXED = ("dtype", "quant", "kv", "compute", "deterministic", "tokens_per_pass", "max_sequences")


def document(
    name: str,
    hardware: Hardware,
    question: PlanRequest,
    choice: Choice,
    points: list[Point],
    ways: list[Suggestion],
    left_out: int,
) -> dict[str, Any]:
    """`left_out` rows may need more tokens than the plan's cache has room for."""
    return {
        "schema": SCHEMA,
        "version": version("moedge"),
        "fits": True,
        "model": _model(name, question.shape),
        "machine": {
            "key": machine_key(hardware),
            "hardware": asdict(hardware),
            "measured": question.speed.rates.measured,
        },
        "job": asdict(question.job),
        "left_out": {"rows": left_out, "takes": question.drafting().for_every_row} if left_out else None,
        "settings": asdict(question.settings),
        "tiers": [asdict(tier) for tier in used_by_tier(question, choice.plan)],
        "plan": choice.plan.as_dict(),
        "prediction": choice.prediction.as_dict(),
        "formats": dict(choice.seconds),
        "points": [asdict(point) for point in points],
        "ways_up": [asdict(way) for way in ways],
    }


def refusal(name: str, question: PlanRequest, reason: str, fitting: list[str]) -> dict[str, Any]:
    """The document of a job that does not fit."""
    return {
        "schema": SCHEMA,
        "version": version("moedge"),
        "fits": False,
        "model": _model(name, question.shape),
        "reason": reason,
        "nearest": fitting,
    }


def load_plan(path: Path, shape: ModelShape, hardware: Hardware, settings: Settings) -> Plan:
    """The plan in a file, for this model on this machine. Raises SettingError where it is for something else."""
    content = _read(path)
    for what, found, wanted in (
        ("model", content["model"]["key"], shape_key(shape)),
        ("machine", content["machine"]["key"], machine_key(hardware)),
    ):
        if found != wanted:
            raise SettingError(f"{path} was made for another {what}; make one for this with `moedge plan --save`")
    plan = plan_from_json(content["plan"])
    for name in _FIXED:
        wanted, planned = getattr(settings, name), getattr(plan, name)
        if wanted not in ("auto", None, planned):
            option = name.replace("_", "-")
            raise SettingError(f"{path} has {option} {planned}, and {wanted} was asked for; leave one of them away")
    return plan


def refuse_other_budgets(plan: Plan, question: PlanRequest) -> None:
    """Raises SettingError where a plan needs more than there is now, or computes elsewhere."""
    if (plan.device is None) != (question.room is None):
        raise SettingError("the plan computes on another tier than this run would; give its --gpu-mem, or a new plan")
    if question.room is not None:
        _refuse_missing_kernels(plan, question.room.gpu.lacks)
    device = (
        []
        if plan.device is None or question.room is None
        else [(plan.device.budget_nbytes, question.room.budget_nbytes)]
    )
    for planned, granted in ((plan.budget_nbytes, question.host), *device):
        if planned > granted:
            raise SettingError(
                f"the plan was made for {planned / 2**30:.2f} GiB of memory and {granted / 2**30:.2f} GiB are granted "
                "now; make a new one, or grant as much"
            )


def _refuse_missing_kernels(plan: Plan, lacks: Lacks) -> None:
    wanted = {"attention": plan.attention == "triton", "cache": plan.stores_by_kernel, "experts": plan.grouped_experts}
    for family, reason in lacks.reasons.items():
        if wanted[family]:
            raise SettingError(f"the plan takes the GPU's kernels for {family}. {reason}. Make a new plan without them")


def plan_from_json(content: Mapping[str, Any]) -> Plan:
    """Raises TypeError or KeyError for what `Plan.as_dict` did not write."""
    device = content["device"]
    if device is not None:
        device = DevicePlan(**{**device, "staging": _placement(device["staging"])})
    lists = {name: tuple(content[name]) for name in ("kv_blocks", "parked_blocks", "notes")}
    return Plan(**{**content, **lists, "placement": _placement(content["placement"]), "device": device})


def _placement(content: Mapping[str, Any]) -> Placement:
    return Placement(**{**content, "held_experts": tuple(content["held_experts"])})


def _model(name: str, shape: ModelShape) -> dict[str, Any]:
    return {
        "name": name,
        "key": shape_key(shape),
        "type": shape.model_type,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA or not content["fits"]:
            raise ValueError
        plan_from_json(content["plan"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise SettingError(f"{path} holds no plan ({SCHEMA}); `moedge plan MODEL --save FILE` writes one") from None
    found: dict[str, Any] = content
    return found
