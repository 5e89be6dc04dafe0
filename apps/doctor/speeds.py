"""Turns the measurements of a machine into findings: disk, memory, link to the GPU, compute. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...face import GIB, Disk, FlopRates, GpuState, Link, Machine, PcieLink, PinLimit, RunRecord, counted, duration, gib
from .finding import Finding, ok, warn

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
        check_disk(machine.disk, machine.hardware.disk),
        ok("memory", f"host memory: {_rate(machine.memory_bytes_s)} read"),
    ]
    if machine.hardware.gpus:
        found += [check_link(machine.link), check_pin_limit(machine.pin)]
    if machine.device_memory_bytes_s is not None:
        found.append(ok("GPU memory", f"{_rate(machine.device_memory_bytes_s)}"))
    # Those of single products, which people compare; the others are for predictions.
    found += [
        ok(f"{unit} rates", _rates({name: each for name, each in rates.items() if " " not in name}))
        for unit, rates in _flop_rates(machine)
        if rates
    ]
    return [*found, check_age(machine, torch)]


def check_disk(disk: Disk | None, device: str) -> Finding:
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


def check_link(link: Link | None) -> Finding:
    if link is None:
        return warn("link", "copies to the GPU were not measured", "moedge doctor, once torch sees the GPU")
    if link.pinned_bytes_s is None:
        says = f"{_rate(link.pageable_bytes_s)} to the GPU; no memory could be pinned"
        return warn("link", says, "native Linux, or a container that may lock memory: docker run --ulimit memlock=-1")
    says = f"{_rate(link.pinned_bytes_s)} to the GPU from pinned memory, {_rate(link.pageable_bytes_s)} pageable"
    if link.pinned_bytes_s < _SLOW_LINK:
        return warn("link", says, "a slot with more PCIe lanes; `nvidia-smi -q` shows the width and generation in use")
    return ok("link", says)


def check_pin_limit(pin: PinLimit | None) -> Finding:
    if pin is None:
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
    return ok("profile", says)


def not_measured() -> Finding:
    return warn("profile", "this machine (with this disk) was not measured yet", "moedge doctor")


def _flop_rates(machine: Machine) -> tuple[tuple[str, FlopRates], ...]:
    return (("CPU", machine.flop_s), ("GPU", machine.device_flop_s))


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


def prediction_findings(runs: Sequence[RunRecord]) -> list[Finding]:
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
