"""The profile of this machine for plans: the saved one, or measured now. Torch-free until something is measured.

The only file that knows which measurements make up a profile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ...offload.machine.bystanders import Bystanders
from ...offload.machine.hardware import Hardware, find_hardware, nearest_existing
from ...offload.machine.profile import Disk, DiskRead, FlopRates, Machine, load_machine, saved_path, this_machine
from ...offload.machine.speeds import (
    large,
    large_files,
    measure_cold_reads,
    measure_device_memory,
    measure_disk,
    measure_link,
    measure_memory,
    measure_pin_limit,
)
from ...offload.memory import host_available, host_resident, trim
from ...quant.native import library
from ..settings.stages import stage

# What measuring takes at most without a GPU, the process with its libraries included: 700 to 770 MiB on two cores.
MEASURING_NBYTES = 896 << 20
_LEAST_NBYTES = 64 << 20
_BUFFER_NBYTES = 256 << 20
_PIN_NBYTES = 4 << 30


def measure_machine(
    folder: Path,
    hardware: Hardware,
    measure_flop_s: Callable[[str], FlopRates] = lambda device: {},
    most_nbytes: int | None = None,
    files: Sequence[Path] = (),
) -> Machine:
    """Takes about twenty-five seconds on an idle machine, and up to a GiB of disk space in `folder` meanwhile.

    `files` are large ones, such as a checkpoint's; those on the disk of `folder` are read too.

    `most_nbytes`, at least 64 MiB, bounds the host memory that each measurement takes; the default is a quarter of the
    available memory. `measure_flop_s` is called with "cpu", and with "cuda" if there is a device.
    """
    from torch import __version__ as release

    budget = max(_LEAST_NBYTES, host_available() // 4 if most_nbytes is None else most_nbytes)
    link = measure_link(min(_BUFFER_NBYTES, budget))
    return Machine(
        hardware=hardware,
        memory_bytes_s=measure_memory(min(_BUFFER_NBYTES, budget)),
        disk=_measure_disk(nearest_existing(folder), files),
        link=link,
        pin=measure_pin_limit(min(_PIN_NBYTES, budget)),
        flop_s=measure_flop_s("cpu"),
        device_memory_bytes_s=measure_device_memory(min(_BUFFER_NBYTES, budget)),
        device_flop_s={} if link is None else measure_flop_s("cuda"),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        # Names the build too, as in 2.11.0+cu130, which the package's metadata may leave out.
        torch=str(release),
        kernels=library.identity(),
    )


def _measure_disk(folder: Path, files: Sequence[Path]) -> Disk | None:
    """What was just written may be in a cache of the storage that no option goes past: files that are older count too,
    those of `folder`, or else `files` on the same disk."""
    disk = measure_disk(folder)
    return disk and replace(disk, cold_bytes_s=measure_cold_reads(_older(folder, files), disk.best_random))


def _older(folder: Path, files: Sequence[Path]) -> list[Path]:
    device = folder.stat().st_dev
    return large_files(folder) or large([path for path in files if path.stat().st_dev == device])


def _read_again(disk: Disk | None, folder: Path, files: Sequence[Path]) -> Disk | None:
    """The disk with the mean of its reads of older files and of those now: many disks have fast and slow seconds."""
    if disk is None or disk.cold_bytes_s is None:
        return disk
    now = measure_cold_reads(_older(folder, files), disk.best_random)
    return disk if now is None else replace(disk, cold_bytes_s=(disk.cold_bytes_s + now) / 2)


# What loads a checkpoint: a few large reads side by side.
_CACHE_READ = DiskRead(4 << 20, 4, 1.0)


def measure_cache_reads(cache: Path) -> float | None:
    """Bytes/s of reads from the folder of downloaded checkpoints, past the page cache; None where its disk is full.

    Reads the largest files that are there, for 1.5 s, or else a file of 256 MiB that is written for the purpose.
    """
    if files := large_files(cache, "models--*/blobs/*"):
        return measure_cold_reads(files, _CACHE_READ)
    blocks, threads = (_CACHE_READ.block_nbytes,), (_CACHE_READ.threads,)
    try:
        disk = measure_disk(nearest_existing(cache), _BUFFER_NBYTES, blocks=blocks, threads=threads)
    except OSError:
        return None
    return None if disk is None else disk.best.bytes_s


def saved_profile(folder: Path) -> Machine | None:
    """None where this hardware, with the disk of `folder`, was never measured; `folder` need not exist."""
    return load_machine(find_hardware(folder), saved_path())


def is_outdated(profile: Machine) -> bool:
    """Whether other CPU kernels than those of this installation were measured."""
    return profile.kernels != library.identity()


def machine_profile(
    folder: Path, again: bool = False, files: Sequence[Path] = (), budget: int | None = None
) -> Machine:
    """The saved profile of this hardware and of the disk of `folder`, measured if there is none, or if `again`.

    `files` are large ones, such as a checkpoint's, which are read if they are on that disk. `budget`, at least
    MEASURING_NBYTES, are the bytes of host memory that this process may take; the default bounds buffers alone.
    """
    return this_machine(folder, partial(_measure, folder, files, budget), again)


def _measure(folder: Path, files: Sequence[Path], budget: int | None, hardware: Hardware) -> Machine:
    from ...offload.device import find_device
    from ..loading.selftest import usable_kernels, usual_needs
    from .pass_rates import (
        device_overheads,
        device_rates,
        faster,
        loading_rates,
        measure_fused_overheads,
        measure_overheads,
        pass_rates,
        weight_rates,
    )

    def rates(where: str) -> FlopRates:
        if where == "cpu" or device is None or gpu is None:
            return {**weight_rates(), **pass_rates()}
        return device_rates(device, gpu)

    announcement = "measuring this machine once (about 30 s): plans need its speeds"
    with stage("measuring this machine", announcement=announcement):
        bystanders, device = Bystanders(), find_device()
        gpu = None if device is None else usable_kernels(device, usual_needs(device))
        most = None if budget is None else min(host_available() // 4, budget - host_resident() - _LEAST_NBYTES)
        machine = measure_machine(folder, hardware, rates, most, files)
        # What is measured in a moment is measured in two, some seconds apart.
        loading, overheads = loading_rates(), measure_overheads()
        loading, disk = faster(loading, loading_rates()), _read_again(machine.disk, nearest_existing(folder), files)
        profile = replace(
            machine,
            disk=disk,
            overheads=overheads,
            fused_overheads=measure_fused_overheads(),
            device_overheads=None if device is None or gpu is None else device_overheads(device, gpu),
            # Why each family of kernels does not run on this GPU, "" if it does.
            kernel_lacks=None if gpu is None else gpu.lacks._asdict(),
            loading=loading,
            others=round(bystanders.share(), 2),
        )
    # What measuring has left would count against the budget of the job that comes next; an engine is a circle.
    gc.collect()
    trim()
    return profile
