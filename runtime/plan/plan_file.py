"""Plans, and the speeds of past runs, as files: what was chosen, what would change it, what it rests on. Torch-free.

Runs are in one small file in the user's state folder, newest first, replaced by a rename: killed at any moment, the old
one or the new one is there. A damaged one counts as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from platformdirs import user_state_path

from ...offload.atomic_file import own_name, write_atomically
from ...offload.machine.hardware import Hardware, cpu_text, find_driver, gpu_text, num_threads
from ...quant.kernels.gpu import Lacks
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import GIB, Settings
from ..shape.model_shape import ModelShape, shape_to_json
from ..shape.shards import SMALLEST_FORMATS, offered_formats
from .kernels import planned_kernels
from .loading_cost import GENERATING, LOADING
from .memory_ledger import OPTIONS, MemoryLedger
from .placement import Plan
from .planner import PlanRequest, PlanResult, SearchSpace, solve

RUNS_SCHEMA = "moedge.runs/3"
MOST_KEPT = 200
# What a job does beside bare passes (sampling, text, the journal, caches that they empty) is in no profile. First jobs
# took 1.05 to 1.7 times the time of compute alone, the middle one a quarter more (bench/results/log.md).
BESIDE_PASSES = MappingProxyType({"compute": 1.25})


@dataclass(frozen=True, slots=True)
class RunRecord:
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
    ratio: float
    predicted_tok_s: float
    measured_tok_s: float
    predicted_peak_nbytes: int
    measured_peak_nbytes: int
    loading_ratio: float = 0.0


def history_path() -> Path:
    return user_state_path("moedge") / "runs.json"


def last_runs(count: int = 5, path: Path | None = None) -> Sequence[RunRecord]:
    """The newest runs of whatever kind, newest first."""
    return _read(path or history_path())[:count]


def keep(record: RunRecord, path: Path | None = None) -> None:
    """Raises OSError where the state folder cannot be written."""
    path = path or history_path()
    records = [record, *_read(path)][:MOST_KEPT]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": RUNS_SCHEMA, "runs": [asdict(each) for each in records]}, indent=1)
    write_atomically(path, text.encode(), own_name(path))


def corrections(records: Sequence[RunRecord], machine: str, shape: str, formats: str) -> dict[str, float]:
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


def _kind(formats: str) -> str:
    """What a `formats_key` says beside the weight format."""
    return formats.partition(" ")[2]


def machine_key(hardware: Hardware) -> str:
    """The hardware that a speed belongs to; the folder of prepared weights may be on another disk."""
    return _digest(asdict(hardware))


def shape_key(shape: ModelShape) -> str:
    return _digest(shape_to_json(shape))


def formats_key(quant: str, dtype: str, compute: str, deterministic: bool, on_device: bool) -> str:
    """The formats that determine how a model is computed, first those that "auto" chooses by speed."""
    weights = f"{quant}x{compute}" if compute == "int8" else quant
    words = [weights, dtype, "deterministic" if deterministic else "", "device" if on_device else ""]
    return " ".join(word for word in words if word)


def formats_of(plan: Plan) -> str:
    return formats_key(plan.quant, plan.dtype, plan.compute, plan.deterministic, plan.staging is not None)


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> list[RunRecord]:
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] != RUNS_SCHEMA:
            return []
        return [_record(content) for content in document["runs"]][:MOST_KEPT]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _record(content: Mapping[str, Any]) -> RunRecord:
    """Raises ValueError or TypeError for what `keep` did not write."""
    record = RunRecord(**content)
    for field in fields(RunRecord):
        value = getattr(record, field.name)
        if field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}")
        if field.type != "str" and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ValueError(f"{field.name} is {value!r}")
    if not record.ratio:
        raise ValueError("a ratio of 0")
    return record


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
    for what, found, wanted in (
        ("model", content["model"]["key"], shape_key(request.shape)),
        ("machine", content["machine"]["key"], machine_key(request.hardware)),
    ):
        if found != wanted:
            raise SettingError(f"{path} was made for another {what}; make one for this with `moedge plan --save`")
    plan = Plan.from_json(content["plan"])
    _refuse_other_settings(path, plan, request.settings)
    if (plan.budget.device is None) != (request.budget.device is None):
        raise SettingError("the plan computes on another tier than this run would; give its --gpu-mem, or a new plan")
    if request.budget.device is not None:
        _refuse_missing_kernels(plan, request.budget.device.gpu.lacks)
    return _within(plan, request)


def _refuse_other_settings(path: Path, plan: Plan, settings: Settings) -> None:
    for name in _FIXED:
        wanted, planned = getattr(settings, name), getattr(plan, name)
        if wanted not in ("auto", None, planned):
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
