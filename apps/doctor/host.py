"""Findings, each the result of one check and what to do about it, and the checks of the host: its memory, the limits on
this process, the installed packages against the requirements of moedge, torch against the driver, and the measured
speeds of disk, memory, the link to the GPU and compute. Torch-free.
"""

from __future__ import annotations

import math
import platform
import resource
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import psutil

from ...face import (
    GIB,
    Driver,
    FlopRates,
    GpuState,
    Machine,
    MemoryGroup,
    PastRun,
    PcieLink,
    TorchBuild,
    auto_host,
    counted,
    disk_free,
    dotted,
    duration,
    gib,
    host_available,
    host_total,
    lacking,
    memory_groups,
    stores,
    unusable_torch,
)

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class Verdict(StrEnum):
    """`WARN` costs speed or memory, `FAIL` prevents a run."""

    OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is the command to type or the thing to change; empty if nothing is wrong."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warn(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Verdict.FAIL, found, fix)


# A process with torch, transformers and bitsandbytes, and a gigabyte for a model.
_LEAST_MEMORY = 3 * GIB // 2
# A store of a hundred layers is a hundred open files.
_LEAST_FILES = 512


@dataclass(frozen=True, slots=True)
class HostMemoryFacts:
    """`ram` and `swap` are the machine's, `total` and `available` what limits leave of it, bytes."""

    ram: int
    swap: int
    total: int
    available: int
    groups: Sequence[MemoryGroup] = ()


def find_host_memory() -> HostMemoryFacts:
    return HostMemoryFacts(
        int(psutil.virtual_memory().total),
        int(psutil.swap_memory().total),
        host_total(),
        host_available(),
        memory_groups(Path("/")),
    )


def check_memory(memory: HostMemoryFacts) -> Finding:
    found = (
        f"{gib(memory.ram)}, {gib(memory.available)} available, {_limit(memory)}; "
        f"--ram auto takes {gib(auto_host(memory.available))}"
    )
    found += f"; swap {gib(memory.swap)} is not used by plans" if memory.swap else ""
    if memory.available < _LEAST_MEMORY:
        return fail("RAM", found, f"free some: any model needs at least {gib(_LEAST_MEMORY)}" + _loosen(memory))
    if memory.total < memory.ram // 2:
        return warn("RAM", found, "if that is not intended," + _loosen(memory).removeprefix(";"))
    return ok("RAM", found)


def check_open_files(limit: int | None = None) -> Finding:
    """`limit` is what the process may open at once, asked of the kernel if not given."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if most < _LEAST_FILES:
        return warn("open files", f"at most {most:,}; prepared weights have one file per layer", "ulimit -n 4096")
    return ok("open files", f"at most {most:,}")


def check_confinement() -> Finding:
    """Whether native code that is taken over by a file is held by the kernel."""
    if missing := lacking():
        found = f"this kernel has no {missing}: native code that a document takes over is bound by limits alone"
        return warn(
            "confinement", found, "a Linux kernel from 5.13 on, with both built in, or documents of people you trust"
        )
    return ok("confinement", "readers of documents and chat templates are shut in by Landlock and seccomp")


def _binding(memory: HostMemoryFacts) -> MemoryGroup | None:
    """The group that sets the total, if it is one."""
    return next((group for group in memory.groups if group.limit == memory.total), None)


def _limit(memory: HostMemoryFacts) -> str:
    if memory.total >= memory.ram:
        return "no limit below that"
    group = _binding(memory)
    return f"limited to {gib(memory.total)} by " + (f"the cgroup {group.folder}" if group else "ulimit")


def _loosen(memory: HostMemoryFacts) -> str:
    if memory.total >= memory.ram:
        return ""
    group = _binding(memory)
    if group is None:
        return "; raise the limit: ulimit -v unlimited -d unlimited"
    return f"; raise the limit of {group.folder} (docker run --memory, systemd MemoryMax=)"


# The space that `--disk auto` keeps free (offload/store/stores.py), and that a small model needs.
_LITTLE_DISK = 20 * GIB


def check_stores(root: Path) -> Finding:
    """The folder for prepared weights and its free space."""
    if not _writable(root):
        return fail("stores", f"{root} cannot be written", "give --disk-dir FOLDER, or set disk-dir in moedge.toml")
    found = stores(root)
    taken = (
        f"{counted(len(found), 'store')} of {gib(sum(store.nbytes for store in found))}" if found else "no store yet"
    )
    free = disk_free(root)
    says = f"{root}: {taken}, {gib(free)} free"
    if free < _LITTLE_DISK:
        prune = "moedge models prune --keep SIZE, or " if found else ""
        return warn("stores", says, f"{prune}--disk-dir FOLDER on another disk")
    return ok("stores", says)


def check_hub_cache(cache: Path, offline: bool) -> list[Finding]:
    """The folder for downloaded checkpoints: its free space, and unfinished downloads."""
    if not _writable(cache):
        return [fail("model cache", f"{cache} cannot be written", "export HF_HOME=FOLDER that you can write")]
    says = f"{cache}: {gib(disk_free(cache))} free" + (", HF_HUB_OFFLINE is set: nothing is downloaded" * offline)
    if disk_free(cache) < _LITTLE_DISK:
        found = [warn("model cache", says, "export HF_HOME=FOLDER on a disk with more space")]
    else:
        found = [ok("model cache", says)]
    if cut := list(unfinished_downloads(cache)):
        some = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        found.append(warn("downloads", f"not finished: {some}", f"hf download {cut[0]}"))
    return found


def unfinished_downloads(cache: Path) -> Iterable[str]:
    """Ids of models with unfinished files in the cache of the hub."""
    for folder in sorted(cache.glob("models--*")):
        if any(folder.glob("blobs/*.incomplete")):
            yield folder.name.removeprefix("models--").replace("--", "/")


def check_state(path: Path) -> Finding:
    """Whether measurements can be saved to `path`."""
    if _writable(path.parent):
        return ok("state", f"profiles and the list of jobs are kept in {path.parent}")
    return warn(
        "state",
        f"{path.parent} cannot be written: measurements and jobs are not recorded",
        "export XDG_STATE_HOME=FOLDER",
    )


def _writable(folder: Path) -> bool:
    """Whether a file can be made there, which permissions alone do not say."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with TemporaryFile(dir=there):
            return True
    except OSError:
        return False


# Builds that pytorch.org offers for the supported releases, newest first: CUDA version and the index's name.
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 6), "cu126"))


def check_packages(wanted: Iterable[str] | None = None, installed: Callable[[str], str] = version) -> Finding:
    """`wanted` are requirement lines, moedge's own if not given; those of extras are left out."""
    from packaging.requirements import Requirement

    lines = list(wanted if wanted is not None else requires("moedge") or ())
    needed = [need for need in map(Requirement, lines) if need.marker is None or need.marker.evaluate({"extra": ""})]
    wrong = {str(need): found for need in needed if (found := _found(need, installed))}
    python = f"Python {platform.python_version()}"
    if wrong:
        mended = " ".join(f"'{need}'" for need in wrong)
        listed = "; ".join(f"{found}, moedge needs {need}" for need, found in wrong.items())
        return fail("packages", f"{python}; {listed}", f"pip install {mended}")
    return ok("packages", f"{python}, moedge {installed('moedge')}, {len(needed)} packages OK")


def check_torch(torch: TorchBuild | None, driver: Driver | None, gpus: int, undriven: bool = False) -> Finding:
    """Checks that torch was built for this machine; `gpus` is the number that the driver shows.

    `undriven`: the machine has a GPU of NVIDIA, and no driver.
    """
    if torch is None:
        return fail("torch", "torch is not installed", "pip install torch")
    if undriven:
        fix = "install NVIDIA's driver; in a container, start it with --gpus all"
        return warn("torch", f"torch {torch.version}; there is a GPU, and no NVIDIA driver", fix)
    if driver is None or gpus == 0:
        build = "CUDA " + dotted(torch.cuda) if torch.cuda else "the CPU"
        reason = "no NVIDIA driver" if driver is None else "the NVIDIA driver shows no GPU to this process"
        return ok("torch", f"torch {torch.version} for {build}; {reason}")
    served = f"driver {driver.release or 'of unknown release'} for CUDA up to {dotted(driver.cuda)}"
    install = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{_index(driver)}"
    reason = unusable_torch(torch, driver)
    if reason or torch.cuda is None:
        return fail("torch", f"{reason}; {served}", f"a newer NVIDIA driver, or {install}" if torch.cuda else install)
    return ok("torch", f"torch {torch.version} for CUDA {dotted(torch.cuda)}, {served}")


def _found(need: Requirement, installed: Callable[[str], str]) -> str:
    """Describes the problem of an installed package; "" if there is none."""
    try:
        found = installed(need.name)
    except PackageNotFoundError:
        return f"{need.name} is not installed"
    return "" if need.specifier.contains(found, prereleases=True) else f"{need.name} {found} is installed"


def _index(driver: Driver) -> str:
    return next((name for cuda, name in _BUILDS if cuda <= driver.cuda), _BUILDS[-1][1])


_GB = 1e9
# Below this, weights on disk make even full batches slower than a page a minute: a spinning disk, or a network's.
_SLOW_DISK = 0.4e9
# Below this, copies to the GPU are what every pass waits for: fewer lanes than an old slot has.
_SLOW_LINK = 5e9
# Staging rings and parked sequences want about this much pinned memory.
_LITTLE_PINNED = 2 << 30


def speed_findings(machine: Machine, torch: str) -> list[Finding]:
    """`torch` is the release that is installed now: rates belong to the one they were measured with."""
    found = [
        check_disk(machine),
        ok("memory", f"host memory: {_rate(machine.memory_bytes_s)} read"),
    ]
    if machine.hardware.gpus:
        found += [check_link(machine), check_pin_limit(machine)]
    if machine.device_memory_bytes_s is not None:
        found.append(ok("GPU memory", f"{_rate(machine.device_memory_bytes_s)}"))
    # Those of single products, which people compare; the others are for predictions.
    found += [
        ok(f"{unit} rates", _rates({name: each for name, each in rates.items() if " " not in name}))
        for unit, rates in (("CPU", machine.flop_s), ("GPU", machine.device_flop_s))
        if rates
    ]
    return [*found, check_age(machine, torch)]


def check_disk(machine: Machine) -> Finding:
    disk, device = machine.disk, machine.hardware.disk
    if disk is None:
        return warn("disk", f"{device}: too full to measure", "free 256 MiB there, or give --disk-dir FOLDER")
    best, scattered = disk.best, disk.best_random
    cold = "" if disk.cold_bytes_s is None else f", {_rate(disk.cold_bytes_s)} of existing stores"
    says = (
        f"{device}: {_rate(best.bytes_s)} in order ({best.threads} x {best.block_nbytes >> 20} MiB), "
        f"{_rate(scattered.bytes_s)} at random{cold}" + ("" if disk.direct else "; without O_DIRECT, a cache may help")
    )
    if best.bytes_s < _SLOW_DISK:
        return warn("disk", says, "give --disk-dir FOLDER on an NVMe disk: weights on disk are read in every pass")
    return ok("disk", says)


def check_cache_reads(cache: Path, bytes_s: float | None) -> Finding:
    """How fast checkpoints are read from where they are downloaded to; a job reads its checkpoint once."""
    if bytes_s is None:
        return warn("cache reads", f"{cache}: was not measured", f"free {gib(GIB)} there")
    says = f"{cache}: {_rate(bytes_s)}; a checkpoint of 60 GB is read in {duration(60e9 / bytes_s)}"
    if bytes_s < _SLOW_DISK:
        return warn(
            "cache reads", says, "export HF_HOME=FOLDER on a faster disk, or `moedge prepare` onto one (--disk-dir)"
        )
    return ok("cache reads", says)


# What `--gpu-mem auto` leaves to a desktop (offload/budget.py).
_MUCH_TAKEN = GIB // 2


def gpu_state_findings(states: Iterable[GpuState], busy: bool) -> list[Finding]:
    """What other programs take of each GPU's memory, and its PCIe link. Only a `busy` link is as fast as it can be."""
    return [finding for state in states for finding in (_check_taken(state), _check_pcie(state, busy)) if finding]


def _check_taken(state: GpuState) -> Finding | None:
    if state.taken_nbytes is None:
        return None
    says = f"{state.gpu.name}: {gib(state.taken_nbytes)} of {gib(state.gpu.nbytes)} are taken"
    if state.taken_nbytes <= _MUCH_TAKEN:
        return ok("GPU in use", says)
    fix = "close what holds it: `nvidia-smi` names the programs; a desktop can run on integrated graphics"
    return warn("GPU in use", f"{says} by a desktop or other programs", fix)


def _check_pcie(state: GpuState, busy: bool) -> Finding | None:
    link, best = state.link, state.best_link
    if link is None or best is None:
        return None
    narrow, slow = link.lanes < best.lanes, busy and link.gt_s < best.gt_s
    if not narrow and not slow:
        return ok("PCIe", f"{state.gpu.name}: {_pcie(best)}")
    now = _pcie(link) if busy else f"{link.lanes} lanes"
    fix = "a slot that is wired for all lanes, mostly the one next to the CPU; the BIOS may also set a generation"
    return warn("PCIe", f"{state.gpu.name}: {now}, and the card can have {_pcie(best)}: copies wait for the link", fix)


def _pcie(link: PcieLink) -> str:
    """`PCIe 4.0 x16`: 8 GT/s are the third generation, and every later one doubles them."""
    return f"PCIe {max(1, round(math.log2(link.gt_s))):.1f} x{link.lanes}"


def check_link(machine: Machine) -> Finding:
    if (link := machine.link) is None:
        return warn("link", "copies to the GPU were not measured", "moedge doctor, once torch sees the GPU")
    if link.pinned_bytes_s is None:
        says = f"{_rate(link.pageable_bytes_s)} to the GPU; no memory could be pinned"
        return warn("link", says, "native Linux, or a container that may lock memory: docker run --ulimit memlock=-1")
    says = f"{_rate(link.pinned_bytes_s)} to the GPU from pinned memory, {_rate(link.pageable_bytes_s)} pageable"
    if link.pinned_bytes_s < _SLOW_LINK:
        return warn("link", says, "a slot with more PCIe lanes; `nvidia-smi -q` shows the width and generation in use")
    return ok("link", says)


def check_pin_limit(machine: Machine) -> Finding:
    if (pin := machine.pin) is None:
        return warn("pinning", "was not measured", "moedge doctor, once torch sees the GPU")
    if pin.refused and pin.nbytes < _LITTLE_PINNED:
        says = f"{gib(pin.nbytes)} can be pinned; plans use 80 % of it and copy the rest through a ring"
        return warn("pinning", says, "native Linux instead of WSL2, or docker run --ulimit memlock=-1")
    return ok("pinning", f"{gib(pin.nbytes)}" + (" before refusal" if pin.refused else " tried, no limit met"))


def check_age(machine: Machine, torch: str, now: datetime | None = None) -> Finding:
    """When it was measured, and whether with the torch that is there."""
    when = (now or datetime.now(UTC)) - datetime.fromisoformat(machine.measured_at) if machine.measured_at else None
    says = "measured " + ("at an unknown time" if when is None else _ago(when.total_seconds()))
    if machine.torch != torch:
        return warn("profile", f"{says}, with torch {machine.torch or 'unknown'}; now it is {torch}", "moedge doctor")
    if machine.is_provisional:
        busy = f"{says}, while other programs used {machine.others:.0%} of the processors: its speeds are provisional"
        return warn("profile", busy, "moedge doctor, when they do less; the next job does it by itself then")
    return ok("profile", says)


def not_measured() -> Finding:
    return warn("profile", "this machine (with this disk) was not measured yet", "moedge doctor")


def _rates(rates: FlopRates) -> str:
    """The rate for the most rows, which prompts see, and for one, by format."""
    return (
        ", ".join(
            f"{'bf16' if name == 'none' else name} {_si(by_rows[max(by_rows)])}/{_si(by_rows[min(by_rows)])}"
            for name, by_rows in rates.items()
        )
        + f" FLOP/s for {_spans(rates)} rows"
    )


def _spans(rates: FlopRates) -> str:
    by_rows = next(iter(rates.values()))
    return f"{max(by_rows):,}/{min(by_rows):,}"


def _si(value: float) -> str:
    # The next unit from a tenth on: rates of one row and of a thousand are read side by side.
    unit, size = next(((unit, size) for unit, size in (("T", 1e12), ("G", 1e9)) if value >= size / 10), ("M", 1e6))
    return f"{value / size:.2g}{unit}" if value < 99.5 * size else f"{value / size:.0f}{unit}"


def _rate(bytes_s: float) -> str:
    if bytes_s >= _GB:
        return f"{bytes_s / _GB:.1f} GB/s"
    return f"{bytes_s / 1e6:.{0 if bytes_s >= 1e7 else 1}f} MB/s"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now" if seconds < 60 else "a minute ago"


# Beyond this the plan of the next job may be far from the best.
_FAR_OFF = 0.5


def prediction_findings(runs: Sequence[PastRun]) -> list[Finding]:
    """`runs` newest first; nothing where none was kept."""
    if not runs:
        return []
    newest = runs[0]
    errors = [run.predicted_tok_s / run.measured_tok_s - 1 for run in runs if run.measured_tok_s]
    says = (
        f"last {counted(len(runs), 'run')}: off by {', '.join(f'{error:+.0%}' for error in errors)}; "
        f"the newest, {newest.model}: {newest.measured_tok_s:,.1f} tok/s, {newest.predicted_tok_s:,.1f} predicted, "
        f"peak {gib(newest.measured_peak_nbytes)} of {gib(newest.predicted_peak_nbytes)} planned"
    )
    if errors and abs(errors[0]) > _FAR_OFF:
        return [
            warn(
                "predictions",
                says,
                "moedge doctor, on an idle machine; later runs of this model correct it",
            )
        ]
    return [ok("predictions", says)]
