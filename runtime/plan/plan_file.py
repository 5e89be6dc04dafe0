"""Saved plans, and the speeds of past runs, as files. Torch-free.

Runs are in one small file in the user's state folder, newest first, replaced by a rename: killed at any moment, the old
one or the new one is there. A damaged one counts as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from platformdirs import user_state_path

from ...offload.atomic_file import own_name, write_atomically
from ...offload.budget import GIB
from ...offload.machine.hardware import Hardware
from ...offload.typed_json import read_as
from ...quant.kernels.gpu import Lacks
from ..settings.errors import SettingError
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import as_found
from .loading_cost import GENERATING, LOADING
from .memory_ledger import OPTIONS, MemoryLedger
from .placement import Plan
from .planner import PlanRequest
from .speculation import OFF

RUNS_SCHEMA = "moedge.runs/3"
MOST_KEPT = 200
# What a job does beside bare passes (sampling, text, the journal, caches that they empty) is in no profile of a CPU.
# First jobs took 1.05 to 1.7 times the time of compute alone, the middle one a quarter more (bench/results/log.md).
BESIDE_PASSES = MappingProxyType({"compute": 1.25})


Amount = Annotated[float, lambda value: 0 <= value < math.inf]
Ratio = Annotated[float, lambda value: 0 < value < math.inf]
Count = Annotated[int, lambda value: value >= 0]


@dataclass(frozen=True, slots=True)
class PastRun:
    """One finished run. `machine`, `shape` and `formats` say of which kind it was; tok/s are of generated tokens.

    `ratio` is the seconds that generating took over those that are predicted without corrections for the tokens that
    it really had, and `bottleneck` the resource that this prediction waits for. `loading_ratio` is the same for
    loading, 0 where nothing was loaded.
    """

    at: str
    machine: str
    model: str
    shape: str
    formats: str
    bottleneck: str
    ratio: Ratio
    predicted_tok_s: Amount
    measured_tok_s: Amount
    predicted_peak_nbytes: Count
    measured_peak_nbytes: Count
    loading_ratio: Amount = 0.0


def history_path() -> Path:
    return user_state_path("moedge") / "runs.json"


def last_runs(count: int = 5, path: Path | None = None) -> Sequence[PastRun]:
    """The newest runs of whatever kind, newest first."""
    return _read(path or history_path())[:count]


def keep(record: PastRun, path: Path | None = None) -> None:
    """Raises OSError where the state folder cannot be written."""
    path = path or history_path()
    records = [record, *_read(path)][:MOST_KEPT]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": RUNS_SCHEMA, "runs": [asdict(each) for each in records]}, indent=1)
    write_atomically(path, text.encode(), own_name(path))


def corrections(records: Sequence[PastRun], machine: str, shape: str, formats: str) -> dict[str, float]:
    """How many times as long as predicted the newest run of the same model took here, to generate and to load.

    `formats` is a `formats_key`, whose weight format counts for nothing: a correction that knew some formats only would
    make those that never ran look fast. What other models taught does not count. A correction is for what is shown;
    choices are made without it, so that the same command chooses the same whatever ran before.
    """
    kind = machine, shape, _kind(formats)
    same = [each for each in records if (each.machine, each.shape, _kind(each.formats)) == kind]
    loading = [each.loading_ratio for each in same if each.loading_ratio]
    newest = ((GENERATING, [each.ratio for each in same]), (LOADING, loading))
    return {name: ratios[0] for name, ratios in newest if ratios}


# So many runs on end that are all off by so much, in the same direction, show that the profile is wrong.
_RUNS_OFF, FAR_OFF = 3, 2.0


def are_off(records: Sequence[PastRun], machine: str, since: str) -> bool:
    """Whether the newest runs on a machine, all of them after `since`, when its profile was measured, took twice as
    long as predicted, or half as long; `records` come newest first."""
    ratios = [each.ratio for each in records if each.machine == machine and each.at > since][:_RUNS_OFF]
    return len(ratios) == _RUNS_OFF and (min(ratios) >= FAR_OFF or max(ratios) <= 1 / FAR_OFF)


def _kind(formats: str) -> str:
    """What a `formats_key` says beside the weight format."""
    return formats.partition(" ")[2]


def machine_key(hardware: Hardware) -> str:
    """The hardware that a speed belongs to; the folder of prepared weights may be on another disk."""
    return _digest(asdict(hardware))


def shape_key(shape: ModelShape) -> str:
    return _digest(asdict(shape))


def formats_key(quant: str, dtype: str, compute: str, deterministic: bool, on_device: bool) -> str:
    """The formats that determine how a model is computed, first those that "auto" chooses by speed."""
    weights = f"{quant}x{compute}" if compute == "int8" else quant
    words = [weights, dtype, "deterministic" if deterministic else "", "device" if on_device else ""]
    return " ".join(word for word in words if word)


def formats_of(plan: Plan) -> str:
    return formats_key(plan.quant, plan.dtype, plan.compute, plan.deterministic, plan.staging is not None)


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> list[PastRun]:
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != RUNS_SCHEMA:
            return []
        return [read_as(PastRun, content) for content in document["runs"]][:MOST_KEPT]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


SCHEMA = "moedge.plan/4"
# Settings whose value in a plan must be the one that a job asks for.
_FIXED = ("dtype", "quant", "kv", "compute", "deterministic", "tokens_per_pass", "max_sequences")


def load_plan(path: Path, request: PlanRequest) -> Plan:
    """The plan in a file, for the request's model, machine, settings and budget.

    Raises SettingError where it was made for something else, or needs more memory than there is now.
    """
    assert request.hardware is not None
    content = read_plan_file(path)
    for what, found, wanted in (
        ("model", content["model"]["key"], shape_key(request.shape)),
        ("machine", content["machine"]["key"], machine_key(request.hardware)),
    ):
        if found != wanted:
            raise SettingError(f"{path} was made for another {what}; make one for this with `moedge plan --save`")
    plan = Plan.from_json(content["plan"])
    _refuse_other_settings(path, plan, request.settings)
    if request.settings.speculate == "off":
        plan = replace(plan, free_tokens=(), undrafted=OFF)
    if request.settings.cpu_experts == "off":
        free = plan.free_nbytes + plan.cpu_experts_nbytes
        plan = replace(plan, cpu_experts=None, cpu_experts_nbytes=0, free_nbytes=free)
    if request.settings.cpu_attention == "off":
        plan = plan.without_cpu_attention()
    hosted = plan.host_kv.host_nbytes if plan.host_kv else 0
    if hosted > request.settings.host_kv_nbytes(request.budget.host_nbytes):
        raise SettingError(
            f"{path} keeps {hosted / GIB:.2f} GiB of keys and values in host memory, and --host-kv "
            f"{request.settings.host_kv} was asked for; drop one of them"
        )
    if (plan.budget.device is None) != (request.budget.device is None):
        raise SettingError("the plan computes on another tier than this run would; give its --gpu-mem, or a new plan")
    if request.budget.device is not None:
        _refuse_missing_kernels(plan, request.budget.device.gpu.lacks)
    return _within(plan, request)


def _refuse_other_settings(path: Path, plan: Plan, settings: Settings) -> None:
    for name in _FIXED:
        wanted, planned = getattr(settings, name), getattr(plan, name)
        if wanted not in ("auto", None, planned) and (name != "quant" or as_found(wanted, planned) != planned):
            option = name.replace("_", "-")
            raise SettingError(f"{path} has {option} {planned}, and {wanted} was asked for; drop one of them")


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
    wanted = {
        "attention": plan.attention == "triton",
        "cache": plan.stores_by_kernel,
        "experts": plan.grouped_products,
        "sampling": plan.draws_by_kernel,
    }
    for family, reason in lacks.reasons.items():
        if wanted[family]:
            raise SettingError(f"the plan takes the GPU's kernels for {family}. {reason}. Make a new plan without them")


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
