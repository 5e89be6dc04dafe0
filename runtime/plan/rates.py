"""Rates of the tier that computes and of the links to it: measured, or assumed where nobody measured. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ...offload.machine.profile import FlopRates, Machine, Overheads
from . import presets
from .loading_cost import LoadingSpeeds

# Rates of a machine without a profile: slow, so that a plan promises too little (docs/dev/internals.md).
SLOW_DISK_BYTES_S = 5e8
SLOW_LINK_BYTES_S = 6e9
SLOW_MEMORY_BYTES_S = 1e10
SLOW_DEVICE_MEMORY_BYTES_S = 2e11
SLOW_FLOP_S: Mapping[int, float] = MappingProxyType({1: 2e9, 64: 5e10})
SLOW_DEVICE_FLOP_S: Mapping[int, float] = MappingProxyType({1: 1e11, 128: 5e12})
SLOW_OVERHEADS = Overheads(layer_s=4e-3, expert_s=3e-4, sequence_s=2e-4, token_s=1e-4, arrival_s=4e-4, schedule_s=2e-4)
# Products of int8 or 4-bit codes with activations that are rounded to int8, compute int8.
INTEGERS = "{}xint8"
WIDE = "fp32"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a tier that computes and of the links to it. FLOP/s are by name, then by number of rows.

    `link_bytes_s` is from the host to a device, `memory_bytes_s` of the memory that weights compute in. A device's
    `overheads` are of the host thread that drives it. `pin_nbytes` of host memory can be page-locked (None: all); the
    rest crosses the link at `staged_bytes_s`, because it is copied within host memory first.
    `fused_overheads` are those of layers that the library of CPU kernels computes as a whole, None if not measured.
    `ram_bytes_s` and `cores` are a device's host's; no cores: nothing is known of them.
    """

    disk_bytes_s: float = SLOW_DISK_BYTES_S
    link_bytes_s: float = SLOW_LINK_BYTES_S
    memory_bytes_s: float = SLOW_MEMORY_BYTES_S
    overheads: Overheads = SLOW_OVERHEADS
    flop_s: FlopRates = field(default_factory=dict)
    otherwise: Mapping[int, float] = field(default_factory=lambda: SLOW_FLOP_S)
    measured: bool = False
    pin_nbytes: int | None = None
    staged_bytes_s: float = SLOW_LINK_BYTES_S
    loading: LoadingSpeeds = field(default_factory=LoadingSpeeds)
    fused_overheads: Overheads | None = None
    ram_bytes_s: float = SLOW_MEMORY_BYTES_S
    cores: int = 0

    def curve(self, *names: str) -> Curve:
        """The rates of products under the first of `names` that was measured."""
        return Curve(next((self.flop_s[name] for name in names if self.flop_s.get(name)), self.otherwise))


class Curve:
    """FLOP/s of products by how many rows they have at once, interpolated between the measured numbers of rows."""

    def __init__(self, rates: Mapping[int, float]) -> None:
        self._points = sorted(rates.items())
        self._rows = [rows for rows, _ in self._points]

    def at(self, rows: float) -> float:
        """A product's seconds are linear between measured numbers of rows; beyond the largest its rate is constant."""
        rows = max(1.0, rows)
        above = bisect_left(self._rows, rows)
        if above == len(self._points):
            return self._points[-1][1]
        high, fast = self._points[above]
        if above == 0:
            # Fewer rows than were measured take as long.
            return fast * rows / high
        low, slow = self._points[above - 1]
        share = (rows - low) / (high - low)
        return rows / ((1 - share) * low / slow + share * high / fast)


def rates_of(machine: Machine | None, on_device: bool = False) -> Rates:
    """The rates of a machine's CPU, or of its device; assumed slow ones for what was not measured."""
    if machine is None:
        return _device_rates(None) if on_device else Rates()
    if on_device:
        return _device_rates(machine)
    return Rates(
        disk_bytes_s=machine.disk.bytes_s if machine.disk else SLOW_DISK_BYTES_S,
        memory_bytes_s=machine.memory_bytes_s,
        overheads=machine.overheads or SLOW_OVERHEADS,
        fused_overheads=machine.fused_overheads,
        flop_s=machine.flop_s,
        measured=True,
        loading=LoadingSpeeds.of(machine),
    )


def _device_rates(machine: Machine | None) -> Rates:
    link = machine.link if machine else None
    memory = (machine.device_memory_bytes_s if machine else None) or SLOW_DEVICE_MEMORY_BYTES_S
    link_bytes_s = (link.pinned_bytes_s or link.pageable_bytes_s) if link else SLOW_LINK_BYTES_S
    host = machine.memory_bytes_s if machine else SLOW_MEMORY_BYTES_S
    overheads = (machine and machine.device_overheads) or presets.OVERHEADS
    return Rates(
        disk_bytes_s=machine.disk.bytes_s if machine and machine.disk else SLOW_DISK_BYTES_S,
        link_bytes_s=link_bytes_s,
        memory_bytes_s=memory,
        # Passes are measured with all experts held.
        overheads=replace(overheads, arrival_s=max(overheads.arrival_s, presets.ARRIVAL_S)),
        flop_s=machine.device_flop_s if machine else {},
        otherwise=SLOW_DEVICE_FLOP_S,
        measured=link is not None,
        pin_nbytes=machine.pin.usable if machine and machine.pin else None,
        # Read, written, and read by the copy.
        staged_bytes_s=min(link_bytes_s, host / 3),
        loading=LoadingSpeeds.of(machine),
        ram_bytes_s=host,
        cores=machine.hardware.cores if machine else 0,
    )
