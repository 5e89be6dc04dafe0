"""The plan of a job on this machine: budgets as found, measured rates, and what earlier runs taught. Torch-free."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...offload.machine.bystanders import is_busy
from ...offload.machine.hardware import Hardware, find_gpus, find_hardware
from ...offload.machine.profile import Machine, load_machine, read_machine, saved_path
from ...offload.memory import host_resident
from ...offload.store.stores import DiskSpace, default_root
from ...quant.formats.format import MIXED_FORMATS
from ..calibration.machine_profile import MEASURING_NBYTES, is_outdated, machine_profile
from ..plan import planner
from ..plan.cost_model import CostModel
from ..plan.loading_cost import Prepared
from ..plan.memory_ledger import MemoryLedger
from ..plan.placement import Plan, Workload
from ..plan.plan_file import (
    BESIDE_PASSES,
    PastRun,
    are_off,
    corrections,
    formats_key,
    formats_of,
    history_path,
    keep,
    last_runs,
    load_plan,
    machine_key,
    read_plan_file,
    shape_key,
)
from ..plan.plan_file import MOST_KEPT as ALL_RUNS
from ..plan.planner import PlanRequest, PlanResult, choose_dtype, solve
from ..plan.presets import Preset, find_preset, with_preset
from ..plan.rates import rates_of
from ..plan.speculation import head_lack
from ..rows.tables import InputFormat
from ..settings.errors import DoesNotFit, ModelNotFound, SettingError
from ..settings.settings import Budgets, MemoryBudget, Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import all_formats, checkpoint_nbytes
from ..source.hub import same_disk
from ..source.model_source import Headers, ModelSource, prepared_nbytes, small_files

if TYPE_CHECKING:
    from ..engine.engine import Metrics
    from ..rows.preflight import Preflight
    from ..rows.row import Defaults
    from .encode import JobSize

# Shorter runs are mostly their beginning and their end.
LEAST_SECONDS = 1.0
# Jobs with a longer estimate at the default rates wait until this machine is measured, and so do those of models that
# are large: loading decides their time, and the disk, whose default rate may be wrong by several times.
LONG_SECONDS = 600.0
LONG_LOADING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Machine:
    """The machine that a job is planned for; `profile` is None if it was never measured."""

    hardware: Hardware
    profile: Machine | None
    elsewhere: bool = False
    preset: str = ""

    @classmethod
    def here(cls, budgets: Budgets) -> _Machine:
        """This machine, with the disk of its prepared weights."""
        hardware = find_hardware(budgets.disk_dir or default_root())
        return cls(hardware, load_machine(hardware, saved_path()))

    @classmethod
    def of_file(cls, path: Path) -> _Machine:
        """Raises SettingError where the file holds no profile."""
        try:
            profile = read_machine(path)
        except (OSError, ValueError) as error:
            raise SettingError(f"--machine: {error}") from None
        return cls(profile.hardware, profile, elsewhere=True)

    def with_gpu(self, name: str) -> _Machine:
        """The same with a GPU of a data sheet. Raises SettingError for a name that is not known."""
        found, preset = _preset(name)
        profile = with_preset(found, preset, self.hardware, self.profile)
        return _Machine(profile.hardware, profile, elsewhere=True, preset=found)

    def measured(self, root: Path, weights: Path, budget: int) -> _Machine:
        """Measures the machine, in about thirty seconds and `budget` bytes of host memory; the disk of the folder
        `root` by the files in the folder `weights`, too."""
        files = sorted(weights.glob("*.safetensors"))
        again = self.is_outdated or (not is_busy() and self.is_off)
        return replace(self, profile=machine_profile(root, again, files, budget))

    @property
    def is_outdated(self) -> bool:
        """Whether kernels that are not used any more were measured."""
        return self.profile is not None and is_outdated(self.profile)

    @property
    def is_off(self) -> bool:
        """Whether jobs since the profile was measured say that it is wrong."""
        profile = self.profile
        return profile is not None and are_off(last_runs(ALL_RUNS), machine_key(self.hardware), profile.measured_at)

    def request(
        self, shape: ModelShape, settings: Settings, on_disk: tuple[MemoryBudget, Prepared], workload: Workload
    ) -> PlanRequest:
        """A plan request by its rates and what its earlier runs taught; `on_disk` is what `_with_disk` found."""
        budget, prepared = on_disk
        on_device, gpu = budget.device is not None, None if budget.device is None else budget.device.gpu
        dtype = choose_dtype(settings.dtype, shape.dtype, gpu)
        formats = formats_key(settings.quant, dtype, settings.compute, settings.deterministic, on_device)
        return PlanRequest(
            # The host thread of a device is counted.
            costs=CostModel(shape, rates_of(self.profile, on_device), {} if on_device else BESIDE_PASSES),
            workload=workload,
            budget=budget,
            settings=settings,
            hardware=self.hardware,
            profile=self.profile,
            prepared=prepared,
            elsewhere=self.elsewhere,
            preset=self.preset,
            corrections=corrections(last_runs(ALL_RUNS), machine_key(self.hardware), shape_key(shape), formats),
        )


def _with_disk(
    budget: MemoryBudget, budgets: Budgets, settings: Settings, model: Headers
) -> tuple[MemoryBudget, Prepared]:
    """The budget with the bytes that may still be written to the disk of prepared weights, as it is now, and what is
    prepared there of the model."""
    if model.recipe:
        return replace(budget, disk_nbytes=None), Prepared(is_model=True)
    root = budgets.disk_dir or default_root()
    space = DiskSpace.of(root, budgets.disk_nbytes())
    new, there = space.new_nbytes, {}
    if model.on_hub and same_disk(root):
        new -= checkpoint_nbytes(model.shape)
    if model.folder is not None:
        dtype = choose_dtype(settings.dtype, model.shape.dtype, None if budget.device is None else budget.device.gpu)
        formats, mtp = (*all_formats(model.shape), *MIXED_FORMATS), model.shape.mtp
        there = prepared_nbytes(model.name, model.folder, formats, dtype, root, space.stores, mtp)
    return replace(budget, disk_nbytes=new), Prepared(there)


def plan_job(
    source: ModelSource,
    settings: Settings,
    budgets: Budgets,
    budget: MemoryBudget,
    workload: Workload,
    saved: Path | None = None,
) -> PlanResult:
    """The best plan within `budget`, which `budgets` came to on this machine; or the plan in the file `saved`.

    Kernels of the CPU that are wrong on this model's widths are not used (loading/selftest.py). A machine without a
    profile, or with one that was measured beside other programs or with other kernels, or that three jobs on end were
    off by two, is measured first where the job or its loading is long and its memory is enough for that. Raises
    DoesNotFit, SettingError.
    """
    machine, settings = _Machine.here(budgets), source.settle(settings)
    headers = Headers(source.name, source.shape, source.weights, source.recipe)

    def request(model: Headers) -> PlanRequest:
        return machine.request(model.shape, settings, _with_disk(budget, budgets, settings, model), workload)

    result = _solve(request, headers, saved)
    profile, memory, expected = machine.profile, budget.host_nbytes, result.prediction
    is_long = expected.total_s > LONG_SECONDS or expected.loading_s > LONG_LOADING_SECONDS
    is_known = profile and not (profile.is_provisional or machine.is_outdated or machine.is_off)
    if is_long and not is_known and memory >= MEASURING_NBYTES:
        machine = machine.measured(budgets.disk_dir or default_root(), source.weights, memory)
        # Libraries that measuring has loaded stay, and experts would be held in their place.
        alone, budget = budget, budget.beside(host_resident())
        try:
            result = _solve(request, headers, saved)
        except DoesNotFit:
            # The bounds of a plan have room for some of it.
            budget = alone
            result = _solve(request, headers, saved)
    # Imports torch, which the jobs that come here have already.
    from ..loading.selftest import checked

    return replace(result, plan=checked(result.request.shape, result.plan))


def refuse_too_small(source: ModelSource, settings: Settings, budgets: Budgets) -> None:
    """Raises DoesNotFit where the budget is too small for any job on this machine, before torch is imported and tokens
    are counted; SettingError, BadSize.

    Says nothing where there is a GPU: what its context takes is known once it is opened.
    """
    if budgets.wants_device and find_gpus():
        return
    budget = budgets.on_cpu()
    costs = CostModel(source.shape, rates_of(None, on_device=False), BESIDE_PASSES)
    request = PlanRequest(costs=costs, workload=equal_rows(1, 1, 0), budget=budget, settings=source.settle(settings))
    planner.refuse_too_small(request)


Requesting: TypeAlias = Callable[[Headers], PlanRequest]


def _solve(request: Requesting, model: Headers, saved: Path | None) -> PlanResult:
    found = request(model)
    if saved is None:
        return with_head(solve(found), request, model)
    key = read_plan_file(saved)["model"]["key"]
    if key != shape_key(model.shape) and (headed := model.headed(found.settings)) and key == shape_key(headed.shape):
        found = request(headed)
    return _result(load_plan(saved, found), found)


def with_head(found: PlanResult, request: Requesting, model: Headers) -> PlanResult:
    """The best plan with the model's own MTP head, where settings leave it open and it pays; else `found`, with a note
    of why not where the model has one. `found` is the best plan of `request` of the model without."""
    plan = found.plan
    if not plan.free_tokens or (headed := model.headed(found.request.settings)) is None:
        return found
    try:
        other = solve(request(headed))
        # As if neither was prepared: the same request chooses the same.
        seconds = found.prediction.seconds / found.correction, other.prediction.seconds / other.correction
        lack = head_lack(plan, other.plan, seconds)
    except DoesNotFit:
        lack = "it does not fit"
    if not lack:
        return other
    return replace(found, plan=replace(plan, notes=(*plan.notes, f"the checkpoint's own head drafts nothing: {lack}")))


def with_workload(chosen: PlanResult, plan: Plan, workload: Workload) -> PlanResult:
    """What to expect of `workload` from an engine that was loaded for another one; `plan` is what it runs by."""
    return _result(plan, replace(chosen.request, workload=workload))


def _result(plan: Plan, request: PlanRequest) -> PlanResult:
    """The result with a plan that was not searched for."""
    seconds = request.costs.predict(plan, request.workload, request.prepared.for_choice).total_s
    return PlanResult.of(plan, {plan.quant: seconds}, request)


def refuse_unknown_machine(machine: Path | None, gpu: str | None) -> None:
    """Raises SettingError where `plan_request` would, before anything long is done."""
    if machine is not None:
        _Machine.of_file(machine)
    if gpu is not None:
        _preset(gpu)


def _preset(name: str) -> tuple[str, Preset]:
    try:
        return find_preset(name)
    except ValueError as error:
        raise SettingError(f"--gpu: {error}") from None


def plan_request(
    headers: Headers,
    settings: Settings,
    budgets: Budgets,
    machine: Path | None,
    workload: Workload,
    gpu: str | None = None,
) -> PlanRequest:
    """A request for a model of which only headers were read; no device is opened.

    `machine` is a file with the profile of another machine, `gpu` a GPU to plan for instead, by its name or described.
    Raises SettingError, BadSize.
    """
    known = _Machine.here(budgets) if machine is None else _Machine.of_file(machine)
    if gpu is not None:
        known = known.with_gpu(gpu)
    tried = known.profile.kernel_lacks if known.profile else None
    budget = budgets.expected(known.hardware, tried, elsewhere=known.elsewhere)
    headers, settings = headers.speculating(settings), headers.settle(settings)
    if known.elsewhere:
        # Of its disk nothing is known but what the user says.
        on_disk = budget, Prepared(is_model=bool(headers.recipe))
    else:
        on_disk = _with_disk(budget, budgets, settings, headers)
    return known.request(headers.shape, settings, on_disk, workload)


def remember(
    result: PlanResult, source: ModelSource, metrics: Metrics, took: tuple[float, float], ledger: MemoryLedger
) -> None:
    """Keeps how the prediction compares with a run, which `took` seconds to load and to generate, for the next one to
    be better."""
    loading_s, seconds = took
    sequences, request, plan = len(metrics.total), result.request, result.plan
    if seconds < LEAST_SECONDS or not sequences or request.hardware is None:
        return
    ran = Workload(sequences, request.workload.longest, None, metrics.prompt_tokens, metrics.generated_tokens)
    uncorrected = request.costs.predict(plan, ran, request.prepared)
    record = PastRun(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_key(request.hardware),
        model=source.name,
        shape=shape_key(request.shape),
        formats=formats_of(plan),
        bottleneck=uncorrected.bottleneck,
        ratio=seconds / uncorrected.seconds,
        predicted_tok_s=result.prediction.generated_tok_s,
        measured_tok_s=metrics.generated_tokens / seconds,
        predicted_peak_nbytes=plan.used_nbytes,
        measured_peak_nbytes=ledger.computing.peak or 0,
        loading_ratio=loading_s / uncorrected.loading_s if uncorrected.loading_s else 0.0,
    )
    try:
        keep(record)
    except OSError as error:
        warnings.warn(
            f"{history_path()} cannot be written ({error}): this run will not improve later predictions", stacklevel=2
        )


def equal_rows(rows: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """A job whose rows have equal lengths."""
    longest = prompt_tokens + output_tokens
    return Workload(rows, longest, longest, rows * prompt_tokens, rows * output_tokens)


def measured_job(
    headers: Headers, rows: Path, defaults: Defaults, kind: InputFormat = InputFormat.AUTO
) -> tuple[JobSize, Preflight]:
    """Checks and tokenizes every row, as a job does, without a trace of it.

    Raises ModelNotFound where the tokenizer is not here, InputUnreadable, InputRefused, SettingError.
    """
    if headers.folder is None:
        raise ModelNotFound(
            f"the tokenizer of {headers.name} is not on this machine, and the tokens of {rows} cannot be counted; "
            "download the model, or leave out the rows and give --rows, --prompt-tokens and --max-tokens"
        )
    # JSON schemas and what they import: a plan of equal rows takes none of it.
    from ..rows.reader import read_rows
    from .folder import JobFolder
    from .request import BatchRequest, settled_rows
    from .session import JobInput

    shape, asked = headers.shape, BatchRequest(headers.name, rows, Path(), defaults=defaults, input_format=kind)
    with tempfile.TemporaryDirectory() as folder, small_files(headers.folder) as small:
        found = JobInput.check(settled_rows(asked, small), JobFolder(Path(folder)))
        # Behind what is refused without tokens: transformers, which reads it, imports torch.
        from ..text.tokenizer import Tokenizer
        from .encode import RowEncoder, measure

        with Tokenizer.load(small) as tokenizer:
            size, _ = measure(read_rows(found.path, found.defaults), RowEncoder(tokenizer, shape.vocab, shape.context))
    return size, found.preflight
