"""The plan of a job on this machine: budgets as found, measured rates, and what earlier runs taught. Torch-free."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ...offload.budget import auto_device, auto_host, parse_size
from ...offload.machine.hardware import Hardware, find_hardware
from ...offload.machine.profile import Machine, load_machine, read_machine, saved_path
from ...offload.store.stores import default_root
from ...quant.kernels.gpu import Lacks
from ..plan.candidate import PROCESS_NBYTES, CostCache, WeightFootprint
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
from ..plan.placement import ASSUMED_CONTEXT_NBYTES, LIBRARIES_NBYTES, WITHOUT_KERNELS, DeviceRoom
from ..plan.plan import Plan, Settings, Workload
from ..plan.plan_file import load_plan, refuse_other_budgets
from ..plan.planner import Choice, Speed
from ..plan.predict import Prediction, predict
from ..plan.rates import rates_of
from ..plan.search_space import choose_dtype
from ..plan.what_if import PlanRequest
from ..settings.budgets import Budgets
from ..settings.errors import ModelNotFound, SettingError
from ..shape.model_shape import ModelShape
from ..shape.shards import FORMATS
from ..source.headers import Headers
from ..source.model_source import ModelSource

if TYPE_CHECKING:
    from ..engine.metrics import Metrics
    from .encode import JobSize

# Shorter runs are mostly their beginning and their end.
LEAST_SECONDS = 1.0
# A job that a slow machine takes longer for than this waits until this machine is measured.
LONG_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """The machine that a job is planned for; `profile` is None where it was never measured."""

    hardware: Hardware
    profile: Machine | None

    @classmethod
    def here(cls, budgets: Budgets) -> KnownMachine:
        """This one, with the disk on which stores lie."""
        hardware = find_hardware(budgets.disk_dir or default_root())
        return cls(hardware, load_machine(hardware, saved_path()))

    def measured(self, budgets: Budgets) -> KnownMachine:
        """Takes about twenty seconds."""
        from ..calibration.machine_profile import machine_profile

        return replace(self, profile=machine_profile(budgets.disk_dir or default_root()))

    def speed(self, shape: ModelShape, settings: Settings, room: DeviceRoom | None) -> Speed:
        """Its rates, corrected by its runs; of a device where there is room on one."""
        on_device = room is not None
        dtype = choose_dtype(settings.dtype, shape.dtype, None if room is None else room.gpu)
        kinds = {
            quant: formats_key(quant, dtype, settings.compute, settings.deterministic, on_device) for quant in FORMATS
        }
        learned = factors(last_runs(ALL_RUNS), machine_key(self.hardware), shape_key(shape), kinds)
        return Speed(rates_of(self.profile, on_device), learned)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, where it runs, and what was chosen for it."""

    job: Workload
    machine: KnownMachine
    speed: Speed
    choice: Choice

    @property
    def plan(self) -> Plan:
        return self.choice.plan

    @property
    def prediction(self) -> Prediction:
        return self.choice.prediction

    def remember(self, source: ModelSource, metrics: Metrics, seconds: float, peak: int) -> None:
        """Keeps how the prediction compares with a run of so many seconds, for the next one to be better."""
        sequences = len(metrics.total)
        if seconds < LEAST_SECONDS or not sequences:
            return
        ran = Workload(sequences, self.job.longest, None, metrics.prompt_tokens, metrics.generated_tokens)
        packed = WeightFootprint(source.shape, self.plan.quant, self.plan.dtype, self.plan.deterministic, None)
        uncorrected = predict(packed.work, self.plan, ran, self.speed.rates)
        record = RunRecord(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine_key(self.machine.hardware),
            model=source.name,
            shape=shape_key(source.shape),
            formats=formats_of(self.plan),
            binds=uncorrected.binds,
            ratio=seconds / uncorrected.seconds,
            predicted_tok_s=self.prediction.generated_tok_s,
            measured_tok_s=metrics.generated_tokens / seconds,
            predicted_peak_nbytes=self.plan.used_nbytes,
            measured_peak_nbytes=peak,
        )
        try:
            keep(record)
        except OSError as error:
            warnings.warn(f"{history_path()} cannot be written ({error}): the next plan learns nothing", stacklevel=2)


def plan_job(
    source: ModelSource,
    settings: Settings,
    budgets: Budgets,
    host: int,
    room: DeviceRoom | None,
    job: Workload,
    saved: Path | None = None,
) -> JobPlan:
    """Within `host` bytes of host memory and the room on a device; or the plan in the file `saved`.

    A machine without a profile is measured first where the job is long. Raises DoesNotFit, SettingError.
    """
    machine = KnownMachine.here(budgets)
    settings = source.settle(settings)
    speed = machine.speed(source.shape, settings, room)
    disk = None if source.store else budgets.disk_nbytes()
    question = PlanRequest(CostCache(source.shape), settings, job, host, room, speed, disk)
    planned = JobPlan(job, machine, speed, _choice(question, machine, saved))
    if machine.profile is None and planned.prediction.seconds > LONG_SECONDS:
        machine = machine.measured(budgets)
        speed = machine.speed(source.shape, settings, room)
        planned = JobPlan(job, machine, speed, _choice(replace(question, speed=speed), machine, saved))
    return planned


def _choice(question: PlanRequest, machine: KnownMachine, saved: Path | None) -> Choice:
    if saved is None:
        return question.answer()
    plan = load_plan(saved, question.shape, machine.hardware, question.settings)
    refuse_other_budgets(plan, question)
    packed = WeightFootprint(question.shape, plan.quant, plan.dtype, plan.deterministic, question.room)
    learned = question.speed.factors.get(plan.quant, {})
    told = predict(packed.work, plan, question.job, question.speed.rates, learned)
    return Choice(plan, told, {plan.quant: told.seconds})


@dataclass(frozen=True, slots=True)
class Asked:
    """The question, and the machine that it is about."""

    machine: KnownMachine
    question: PlanRequest


def ask(headers: Headers, settings: Settings, budgets: Budgets, machine: Path | None, job: Workload) -> Asked:
    """`machine` is a file with the profile of another machine. Raises SettingError, BadSize."""
    settings = headers.settle(settings)
    known = KnownMachine.here(budgets) if machine is None else _other(machine)
    hardware = known.hardware
    host = budgets.host_nbytes() if machine is None else _share(budgets.ram, hardware.ram_nbytes)
    room = _room(budgets, hardware, known.profile.kernel_lacks if known.profile else None)
    speed = known.speed(headers.shape, settings, room)
    return Asked(known, PlanRequest(CostCache(headers.shape), settings, job, host, room, speed, budgets.disk_nbytes()))


def equal_rows(rows: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """A job whose rows are all alike."""
    longest = prompt_tokens + output_tokens
    return Workload(rows, longest, longest, rows * prompt_tokens, rows * output_tokens)


def measured_job(headers: Headers, rows: Path, max_tokens: int) -> JobSize:
    """Tokenizes every row, as a job does. Raises ModelNotFound where the tokenizer is not here."""
    if headers.folder is None:
        raise ModelNotFound(f"{headers.name} is not here, and counting the tokens of {rows} takes its tokenizer")
    # A tokenizer, JSON schemas and what they import: a plan of equal rows takes none of it.
    from ..rows.reader import read_rows
    from ..rows.row import Defaults
    from ..text.tokenizer import Tokenizer
    from .encode import RowEncoder, measure

    shape, defaults = headers.shape, Defaults(max_tokens=max_tokens)
    with Tokenizer.load(headers.folder) as tokenizer:
        size, _ = measure(read_rows(rows, defaults), RowEncoder(tokenizer, shape.vocab, shape.context))
    return size


def _other(path: Path) -> KnownMachine:
    try:
        profile = read_machine(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"--machine: {error}") from None
    return KnownMachine(profile.hardware, profile)


def _share(size: str, total: int) -> int:
    """Of another machine, all that is there counts as available."""
    return parse_size(size, total, total, auto_host)


def _room(budgets: Budgets, hardware: Hardware, tried: Mapping[str, str] | None) -> DeviceRoom | None:
    """Of the first GPU, whose context is taken to be as large as contexts get. `tried` says why its kernels do not run,
    by family; None where they were never tried.
    """
    if not budgets.wants_device:
        return None
    if not hardware.gpus:
        budgets.without_device()
        return None
    first = hardware.gpus[0]
    total = first.nbytes
    budget = parse_size(budgets.gpu_mem, total, total, auto_device)
    gpu = WITHOUT_KERNELS._replace(processors=max(1, first.processors))
    if first.capability:
        major, minor = first.capability.split(".")
        gpu = gpu._replace(capability=(int(major), int(minor)))
    if tried is not None:
        gpu = gpu._replace(lacks=Lacks(*(tried.get(family, "") for family in Lacks._fields)))
    return DeviceRoom(budget, ASSUMED_CONTEXT_NBYTES + LIBRARIES_NBYTES, PROCESS_NBYTES + LIBRARIES_NBYTES, gpu)
