"""From what a person asks of `moedge plan` to a question that the planner answers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..offload.budget import auto_device, auto_host, parse_size
from ..offload.machine.hardware import Hardware
from ..offload.machine.saved import read_machine
from ..quant.kernels.gpu import Lacks
from .errors import ModelNotFound, SettingError
from .headers import Headers
from .job_plan import KnownMachine
from .plan.budgets import Budgets
from .plan.device_plan import ASSUMED_CONTEXT_NBYTES, LIBRARIES_NBYTES, WITHOUT_KERNELS, DeviceRoom
from .plan.draft import PROCESS_NBYTES
from .plan.job import JobShape
from .plan.outlook import Question
from .plan.packed_model import PackedModel
from .plan.plan import Settings

if TYPE_CHECKING:
    from .jobs.measure import JobSize


@dataclass(frozen=True, slots=True)
class Asked:
    """The question, and the machine that it is about."""

    machine: KnownMachine
    question: Question


def ask(headers: Headers, settings: Settings, budgets: Budgets, machine: Path | None, job: JobShape) -> Asked:
    """`machine` is a file with the profile of another machine. Raises SettingError, BadSize."""
    settings = headers.settle(settings)
    known = KnownMachine.here(budgets) if machine is None else _other(machine)
    hardware = known.hardware
    host = budgets.host_nbytes() if machine is None else _share(budgets.ram, hardware.ram_nbytes)
    room = _room(budgets, hardware, known.profile.kernel_lacks if known.profile else None)
    speed = known.speed(headers.shape, settings, room)
    return Asked(known, Question(PackedModel(headers.shape), settings, job, host, room, speed, budgets.disk_nbytes()))


def equal_rows(rows: int, prompt_tokens: int, output_tokens: int) -> JobShape:
    """A job whose rows are all alike."""
    longest = prompt_tokens + output_tokens
    return JobShape(rows, longest, longest, rows * prompt_tokens, rows * output_tokens)


def measured_job(headers: Headers, rows: Path, max_tokens: int) -> JobSize:
    """Tokenizes every row, as a job does. Raises ModelNotFound where the tokenizer is not here."""
    if headers.folder is None:
        raise ModelNotFound(f"{headers.name} is not here, and counting the tokens of {rows} takes its tokenizer")
    # A tokenizer, JSON schemas and what they import: a plan of equal rows takes none of it.
    from .jobs.encode import RowEncoder
    from .jobs.measure import measure
    from .jobs.reader import read_rows
    from .jobs.rows import Defaults
    from .text.tokenizer import Tokenizer

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
