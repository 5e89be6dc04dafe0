"""The plan of a job on this machine: budgets as found, measured rates, and what earlier runs taught. Torch-free."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..offload.machine.hardware import Hardware, find_hardware
from ..offload.machine.profile import Machine
from ..offload.machine.saved import load_machine, saved_path
from ..offload.store.stores import default_root
from .model_source import ModelSource
from .plan.budgets import Budgets
from .plan.device_plan import DeviceRoom
from .plan.draft import Packed
from .plan.drafting import choose_dtype
from .plan.history import MOST_KEPT as ALL_RUNS
from .plan.history import (
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
from .plan.job import JobShape
from .plan.outlook import Question
from .plan.packed_model import PackedModel
from .plan.plan import Plan, Settings
from .plan.planner import Choice, Speed
from .plan.predict import Prediction, predict
from .plan.rates import rates_of
from .plan_document import load_plan, refuse_other_budgets
from .shape.layouts import FORMATS
from .shape.model_shape import ModelShape

if TYPE_CHECKING:
    # What it counts is of no use to plans that load no torch.
    from .metrics import Metrics

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
        from .machine_profile import machine_profile

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

    job: JobShape
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
        ran = JobShape(sequences, self.job.longest, None, metrics.prompt_tokens, metrics.generated_tokens)
        packed = Packed(source.shape, self.plan.quant, self.plan.dtype, self.plan.deterministic, None)
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
    job: JobShape,
    saved: Path | None = None,
) -> JobPlan:
    """Within `host` bytes of host memory and the room on a device; or the plan in the file `saved`.

    A machine without a profile is measured first where the job is long. Raises DoesNotFit, SettingError.
    """
    machine = KnownMachine.here(budgets)
    settings = source.settle(settings)
    speed = machine.speed(source.shape, settings, room)
    disk = None if source.store else budgets.disk_nbytes()
    question = Question(PackedModel(source.shape), settings, job, host, room, speed, disk)
    planned = JobPlan(job, machine, speed, _choice(question, machine, saved))
    if machine.profile is None and planned.prediction.seconds > LONG_SECONDS:
        machine = machine.measured(budgets)
        speed = machine.speed(source.shape, settings, room)
        planned = JobPlan(job, machine, speed, _choice(replace(question, speed=speed), machine, saved))
    return planned


def _choice(question: Question, machine: KnownMachine, saved: Path | None) -> Choice:
    if saved is None:
        return question.answer()
    plan = load_plan(saved, question.shape, machine.hardware, question.settings)
    refuse_other_budgets(plan, question)
    packed = Packed(question.shape, plan.quant, plan.dtype, plan.deterministic, question.room)
    learned = question.speed.factors.get(plan.quant, {})
    told = predict(packed.work, plan, question.job, question.speed.rates, learned)
    return Choice(plan, told, {plan.quant: told.seconds})
