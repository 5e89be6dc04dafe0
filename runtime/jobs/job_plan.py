"""The plan of a job on this machine: budgets as found, measured rates, and what earlier runs taught. Torch-free."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...offload.machine.hardware import Hardware, find_hardware
from ...offload.machine.profile import Machine, load_machine, read_machine, saved_path
from ...offload.store.stores import default_root
from ..plan.cost_model import CostModel, rates_of
from ..plan.history import MOST_KEPT as ALL_RUNS
from ..plan.history import (
    RunRecord,
    factors,
    formats_key,
    formats_of,
    history_path,
    keep,
    last_runs,
    machine_key,
    shape_key,
)
from ..plan.memory_ledger import MemoryLedger
from ..plan.placement import Workload
from ..plan.plan_file import load_plan
from ..plan.planner import PlanRequest, PlanResult, choose_dtype, solve
from ..rows.tables import InputFormat
from ..settings.budgets import Budgets, DeviceBudget, MemoryBudget
from ..settings.errors import ModelNotFound, SettingError
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import FORMATS
from ..source.headers import Headers
from ..source.model_source import ModelSource

if TYPE_CHECKING:
    from ..engine.metrics import Metrics
    from ..rows.preflight import Preflight
    from ..rows.row import Defaults
    from .encode import JobSize

# Shorter runs are mostly their beginning and their end.
LEAST_SECONDS = 1.0
# Jobs with a longer estimate at the default rates wait until this machine is measured.
LONG_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Machine:
    """The machine that a job is planned for; `profile` is None if it was never measured."""

    hardware: Hardware
    profile: Machine | None

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
        return cls(profile.hardware, profile)

    def measured(self, budgets: Budgets) -> _Machine:
        """Measures the machine, in about twenty seconds."""
        from ..calibration.machine_profile import machine_profile

        return replace(self, profile=machine_profile(budgets.disk_dir or default_root()))

    def costs(self, shape: ModelShape, settings: Settings, device: DeviceBudget | None) -> CostModel:
        """The cost model from its rates, corrected by its runs; with the rates of `device` if there is one."""
        on_device = device is not None
        dtype = choose_dtype(settings.dtype, shape.dtype, None if device is None else device.gpu)
        kinds = {
            quant: formats_key(quant, dtype, settings.compute, settings.deterministic, on_device) for quant in FORMATS
        }
        learned = factors(last_runs(ALL_RUNS), machine_key(self.hardware), shape_key(shape), kinds)
        return CostModel(shape, rates_of(self.profile, on_device), learned)

    def request(self, shape: ModelShape, settings: Settings, budget: MemoryBudget, workload: Workload) -> PlanRequest:
        """A plan request for this machine."""
        costs = self.costs(shape, settings, budget.device)
        return PlanRequest(
            costs=costs,
            workload=workload,
            budget=budget,
            settings=settings,
            hardware=self.hardware,
            profile=self.profile,
        )


def plan_job(
    source: ModelSource,
    settings: Settings,
    budgets: Budgets,
    budget: MemoryBudget,
    workload: Workload,
    saved: Path | None = None,
) -> PlanResult:
    """The best plan within `budget`, which `budgets` came to on this machine; or the plan in the file `saved`.

    A machine without a profile is measured first where the job is long. Raises DoesNotFit, SettingError.
    """
    machine, settings = _Machine.here(budgets), source.settle(settings)
    if source.store:
        # The store is there already.
        budget = replace(budget, disk_nbytes=None)
    result = _solve(machine.request(source.shape, settings, budget, workload), saved)
    if machine.profile is None and result.prediction.seconds > LONG_SECONDS:
        measured = machine.measured(budgets)
        result = _solve(measured.request(source.shape, settings, budget, workload), saved)
    return result


def _solve(request: PlanRequest, saved: Path | None) -> PlanResult:
    if saved is None:
        return solve(request)
    plan = load_plan(saved, request)
    prediction = request.costs.predict(plan, request.workload)
    return PlanResult(plan, prediction, {plan.quant: prediction.seconds}, request)


def plan_request(
    headers: Headers, settings: Settings, budgets: Budgets, machine: Path | None, workload: Workload
) -> PlanRequest:
    """A request for a model of which only headers were read; no device is opened.

    `machine` is a file with the profile of another machine. Raises SettingError, BadSize.
    """
    known = _Machine.here(budgets) if machine is None else _Machine.of_file(machine)
    budget = budgets.expected(
        known.hardware, known.profile.kernel_lacks if known.profile else None, elsewhere=machine is not None
    )
    return known.request(headers.shape, headers.settle(settings), budget, workload)


def remember(result: PlanResult, source: ModelSource, metrics: Metrics, seconds: float, ledger: MemoryLedger) -> None:
    """Keeps how the prediction compares with a run of `seconds`, for the next one to be better."""
    sequences, request, plan = len(metrics.total), result.request, result.plan
    if seconds < LEAST_SECONDS or not sequences or request.hardware is None:
        return
    ran = Workload(sequences, request.workload.longest, None, metrics.prompt_tokens, metrics.generated_tokens)
    uncorrected = request.costs.uncorrected().predict(plan, ran)
    record = RunRecord(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_key(request.hardware),
        model=source.name,
        shape=shape_key(source.shape),
        formats=formats_of(plan),
        bottleneck=uncorrected.bottleneck,
        ratio=seconds / uncorrected.seconds,
        predicted_tok_s=result.prediction.generated_tok_s,
        measured_tok_s=metrics.generated_tokens / seconds,
        predicted_peak_nbytes=plan.used_nbytes,
        measured_peak_nbytes=ledger.computing.peak or 0,
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
            f"{headers.name} is not in the local cache, and its tokenizer is needed to count the tokens of {rows}"
        )
    # A tokenizer, JSON schemas and what they import: a plan of equal rows takes none of it.
    from ..rows.reader import read_rows
    from ..text.tokenizer import Tokenizer
    from .encode import RowEncoder, measure
    from .folder import JobFolder
    from .request import BatchRequest, settled_rows
    from .session import JobInput

    shape, asked = headers.shape, BatchRequest(headers.name, rows, Path(), defaults=defaults, input_format=kind)
    request = settled_rows(asked, headers.folder)
    with tempfile.TemporaryDirectory() as folder, Tokenizer.load(headers.folder) as tokenizer:
        found = JobInput.check(request, JobFolder(Path(folder)))
        size, _ = measure(read_rows(found.path, found.defaults), RowEncoder(tokenizer, shape.vocab, shape.context))
    return size, found.preflight
