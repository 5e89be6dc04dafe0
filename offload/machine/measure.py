"""Measures everything once: the one place that knows which measurements make a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..memory import host_available
from .device import measure_device_memory, measure_link, measure_pin_limit
from .disk import large_files, measure_cold_reads, measure_disk
from .hardware import Hardware, nearest_existing
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
    """About twenty seconds on an idle machine. Needs up to a GiB on the disk of `folder` for that time.

    `most_nbytes`, at least 64 MiB, bounds the host memory that each measurement takes; not given, it is a quarter of
    what is available. `measure_flop_s` comes from the floor that knows weight formats; it is asked for "cpu", and for
    "cuda" where there is a device.
    """
    room = max(_LEAST_NBYTES, host_available() // 4 if most_nbytes is None else most_nbytes)
    link = measure_link(min(_BUFFER_NBYTES, room))
    return Machine(
        hardware=hardware,
        memory_bytes_s=measure_memory(min(_BUFFER_NBYTES, room)),
        disk=_measure_disk(nearest_existing(folder)),
        link=link,
        pin=measure_pin_limit(min(_PIN_NBYTES, room)),
        flop_s=measure_flop_s("cpu"),
        device_memory_bytes_s=measure_device_memory(min(_BUFFER_NBYTES, room)),
        device_flop_s={} if link is None else measure_flop_s("cuda"),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=version("torch"),
    )


def _measure_disk(folder: Path) -> Disk | None:
    disk = measure_disk(folder)
    return disk and replace(disk, cold_bytes_s=measure_cold_reads(large_files(folder), disk.best_random))
