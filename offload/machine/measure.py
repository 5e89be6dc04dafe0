"""Measures the whole machine once: the only file that knows which measurements make up a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..memory import host_available
from .disk import large_files, measure_cold_reads, measure_disk
from .hardware import Hardware, nearest_existing
from .link import measure_device_memory, measure_link, measure_pin_limit
from .profile import Disk, FlopRates, Machine
from .timing import measure_memory

_LEAST_NBYTES = 64 << 20
_BUFFER_NBYTES = 256 << 20
_PIN_NBYTES = 4 << 30


def measure_machine(
    folder: Path,
    hardware: Hardware,
    measure_flop_s: Callable[[str], FlopRates] = lambda device: {},
    most_nbytes: int | None = None,
) -> Machine:
    """Takes about twenty seconds on an idle machine, and up to a GiB of disk space in `folder` meanwhile.

    `most_nbytes`, at least 64 MiB, bounds the host memory that each measurement takes; the default is a quarter of the
    available memory. `measure_flop_s` comes from the floor that knows weight formats; it is called with "cpu", and with
    "cuda" if there is a device.
    """
    budget = max(_LEAST_NBYTES, host_available() // 4 if most_nbytes is None else most_nbytes)
    link = measure_link(min(_BUFFER_NBYTES, budget))
    return Machine(
        hardware=hardware,
        memory_bytes_s=measure_memory(min(_BUFFER_NBYTES, budget)),
        disk=_measure_disk(nearest_existing(folder)),
        link=link,
        pin=measure_pin_limit(min(_PIN_NBYTES, budget)),
        flop_s=measure_flop_s("cpu"),
        device_memory_bytes_s=measure_device_memory(min(_BUFFER_NBYTES, budget)),
        device_flop_s={} if link is None else measure_flop_s("cuda"),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=version("torch"),
    )


def _measure_disk(folder: Path) -> Disk | None:
    disk = measure_disk(folder)
    return disk and replace(disk, cold_bytes_s=measure_cold_reads(large_files(folder), disk.best_random))
