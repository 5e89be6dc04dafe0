"""The machine profile: the measured speeds of one machine, their JSON, and the file that keeps them. Torch-free.

The profile does not contain what is free at the moment.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_state_path

from ..atomic_file import own_name, write_atomically
from ..typed_json import read_as
from .bystanders import BUSY, is_busy
from .hardware import Hardware, find_hardware


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _is_time(text: str) -> bool:
    return text == "" or bool(datetime.fromisoformat(text))


def _is_share(number: float) -> bool:
    return 0 <= number <= 1


Count = Annotated[int, _positive]
Rate = Annotated[float, _positive]
# FLOP/s by weight format, then by number of rows (tokens) multiplied at once.
FlopRates = Mapping[str, Annotated[Mapping[int, Rate], lambda rates: all(map(_positive, rates))]]
# How other rates are named: several experts side by side, attention over a KV format (of heads of 128, or of another
# size), and over latents by torch.
TOGETHER = "{} together"
ATTENTION = "attention {}"
HEADS = ATTENTION + ", heads of {}"
LATENTS = "attention over latents"
# Logits per second, not FLOP/s, of rows whose tokens a device draws.
DRAWING = "drawing"


@dataclass(frozen=True, slots=True)
class DiskRead:
    """One way to read a file and its rate in bytes/s; `random` reads blocks in random order, else in file order."""

    block_nbytes: Count
    threads: Count
    bytes_s: Rate
    random: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """Measured reads of a file of `nbytes`; `direct` is false if the file system has no O_DIRECT.

    `cold_bytes_s` is the rate of reading files that existed before the measurement; None if there were none.
    `write_bytes_s` is the rate of writing and flushing the file; None if that was not timed.
    """

    direct: bool
    nbytes: Count
    reads: Annotated[tuple[DiskRead, ...], len]
    cold_bytes_s: Rate | None = None
    write_bytes_s: Rate | None = None

    @property
    def bytes_s(self) -> float:
        """The rate at which weights are read in every pass, bytes/s."""
        return min(self.best.bytes_s, self.cold_bytes_s or self.best.bytes_s)

    @property
    def best(self) -> DiskRead:
        """The fastest sequential read, which streamed weights use; the fastest random one if none is sequential."""
        return max(self.reads, key=lambda read: (not read.random, read.bytes_s))

    @property
    def one_thread_bytes_s(self) -> float:
        """What a single reader gets from the start of a file to its end: how a checkpoint is read."""
        return max((read.bytes_s for read in self.reads if read.threads == 1 and not read.random), default=self.bytes_s)

    @property
    def best_random(self) -> DiskRead:
        """The fastest random read, which scattered experts use; the fastest sequential one if none is random."""
        return max(self.reads, key=lambda read: (read.random, read.bytes_s))


@dataclass(frozen=True, slots=True)
class Link:
    """Rates of copies from host to device; `pinned_bytes_s` is None if no memory could be pinned."""

    pageable_bytes_s: Rate
    pinned_bytes_s: Rate | None


@dataclass(frozen=True, slots=True)
class PinLimit:
    """How much host memory could be page-locked; `refused` is false if the probe ended before it met a limit."""

    nbytes: Annotated[int, lambda nbytes: nbytes >= 0]
    refused: bool

    @property
    def usable(self) -> int | None:
        """The most bytes to pin, which leaves a fifth of the limit to other users; None if no limit was met."""
        return self.nbytes * 4 // 5 if self.refused else None


@dataclass(frozen=True, slots=True)
class Overheads:
    """Fixed overhead of a pass in seconds, excluding matmuls: per layer, and in each layer per routed expert, per
    sequence and per token. `arrival_s` is the additional overhead per streamed expert, whatever its size, and
    `schedule_s` that per sequence outside the layers: to schedule it, draw its token and keep it."""

    layer_s: Rate
    expert_s: Rate
    sequence_s: Rate
    token_s: Rate
    arrival_s: Rate
    schedule_s: Rate


@dataclass(frozen=True, slots=True)
class LoadingRates:
    """Bytes of a checkpoint's weights that each step of loading takes in a second.

    `convert_bytes_s`: copied out of the files and joined to the matrices that are multiplied, by one thread.
    `pack_bytes_s`: from these to a weight format, by format, on all threads.
    """

    convert_bytes_s: Rate
    pack_bytes_s: Mapping[str, Rate]


@dataclass(frozen=True, slots=True)
class Machine:
    """The profile of a machine. A field is None if the machine lacks that part or it could not be measured.

    `flop_s` and `device_flop_s` are FLOP/s by weight format and number of rows. `kernel_lacks` says for each family of
    GPU kernels why it does not run; "" if it runs. `measured_at` is UTC in ISO 8601, `torch` is torch's version, and
    `kernels` names the CPU kernels that were measured; all may be empty. `others` is the share of the processors that
    other programs used meanwhile: above BUSY (bystanders.py), the speeds are provisional. `fused_overheads` are those
    of passes whose layers the library of CPU kernels computes as a whole, `device_overheads` those of passes on the
    GPU.
    """

    hardware: Hardware
    memory_bytes_s: Rate
    disk: Disk | None = None
    link: Link | None = None
    pin: PinLimit | None = None
    flop_s: FlopRates = field(default_factory=dict)
    device_memory_bytes_s: Rate | None = None
    device_flop_s: FlopRates = field(default_factory=dict)
    measured_at: Annotated[str, _is_time] = ""
    torch: str = ""
    overheads: Overheads | None = None
    fused_overheads: Overheads | None = None
    device_overheads: Overheads | None = None
    kernel_lacks: Mapping[str, str] | None = None
    loading: LoadingRates | None = None
    others: Annotated[float, _is_share] = 0.0
    kernels: str = ""

    @property
    def is_provisional(self) -> bool:
        return self.others > BUSY

    def to_json(self) -> dict[str, Any]:
        """The profile as dicts, lists, strings and numbers, as `json` reads them back."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_json(cls, content: Any) -> Machine:
        """Raises ValueError for anything that `to_json` does not write."""
        try:
            machine: Machine = read_as(cls, content)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a machine profile: {error}") from None
        if machine.to_json() != content:
            raise ValueError("not a machine profile: a value is missing")
        return machine


SCHEMA = "moedge.machine/8"
# Several profiles are kept: for several disks, and for several machines that share a home folder.
_MOST_KEPT = 8


def saved_path() -> Path:
    """The file that keeps the profiles of this user."""
    return user_state_path("moedge") / "machine.json"


def this_machine(
    folder: Path, measure: Callable[[Hardware], Machine], again: bool = False, path: Path | None = None
) -> Machine:
    """The saved profile of this hardware and of the disk of `folder`; it is measured and saved if there is none, or
    where others kept the machine busy when it was, and do no more.

    `again` measures in any case. `path` is the file that keeps the profiles, by default `saved_path()`.
    """
    hardware, path = find_hardware(folder), path or saved_path()
    saved = None if again else load_machine(hardware, path)
    if saved is None or (saved.is_provisional and not is_busy()):
        saved = measure(hardware)
        if saved.is_provisional:
            warnings.warn(
                f"other programs used {saved.others:.0%} of the processors while this machine was measured: estimates "
                "are provisional, and it is measured again when they do less",
                stacklevel=2,
            )
        try:
            save_machine(saved, path)
        except OSError as error:
            warnings.warn(f"{path} cannot be written ({error}): the machine is measured again next time", stacklevel=2)
    return saved


def read_machine(path: Path) -> Machine:
    """The first profile in a file that `moedge doctor --json` printed, on this machine or another.

    Raises ValueError if the file has no profile, OSError if it cannot be read.
    """
    path.open().close()
    machines = _kept(path)
    if not machines:
        raise ValueError(f"{path} holds no undamaged profile; `moedge doctor --json` prints one ({SCHEMA})")
    return machines[0]


def load_machine(hardware: Hardware, path: Path) -> Machine | None:
    """The saved profile of this hardware; None if there is no undamaged one."""
    return next((machine for machine in _kept(path) if machine.hardware == hardware), None)


def save_machine(machine: Machine, path: Path) -> None:
    """Replaces the profile of the same hardware. If the process is killed, the file is the old one or the new one."""
    others = [kept for kept in _kept(path) if kept.hardware != machine.hardware]
    profiles = [kept.to_json() for kept in (machine, *others)][:_MOST_KEPT]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "machines": profiles}, indent=1)
    write_atomically(path, text.encode(), own_name(path))


def _kept(path: Path) -> list[Machine]:
    """The undamaged profiles, newest first. Damaged ones are left out, so that they are measured again."""
    machines = []
    for content in _contents(path):
        try:
            machines.append(Machine.from_json(content))
        except ValueError:
            continue
    return machines


def _contents(path: Path) -> list[Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(document, dict) and document.get("schema") == SCHEMA
    machines = document.get("machines") if known else None
    return machines if isinstance(machines, list) else []
