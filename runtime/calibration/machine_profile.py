"""The profile of this machine for plans: the saved one, or measured now. Torch-free until something is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...offload.heap import trim
from ...offload.machine.hardware import Hardware, find_hardware
from ...offload.machine.measure import measure_machine
from ...offload.machine.profile import FlopRates, Machine, load_machine, saved_path, this_machine


def saved_profile(folder: Path) -> Machine | None:
    """None where this hardware, with the disk of `folder`, was never measured; `folder` need not exist."""
    return load_machine(find_hardware(folder), saved_path())


def machine_profile(folder: Path, again: bool = False) -> Machine:
    """The saved profile of this hardware and of the disk of `folder`, measured if there is none, or if `again`."""
    return this_machine(folder, partial(_measure, folder), again)


def _measure(folder: Path, hardware: Hardware) -> Machine:
    from .overheads import measure_overheads
    from .pass_rates import loading_rates

    machine = measure_machine(folder, hardware, measure_flop_s=_rates)
    overheads, loading = measure_overheads(), loading_rates()
    profile = replace(machine, overheads=overheads, kernel_lacks=_kernel_lacks(), loading=loading)
    # What measuring has left free in the heap would count against the budget of the job that comes next.
    trim()
    return profile


def _kernel_lacks() -> dict[str, str] | None:
    """Why each family of kernels does not run on this GPU ("" if it does); None without a GPU."""
    from ...offload.device import find_device
    from ..loading.kernel_trial import try_kernels, usual_needs

    device = find_device()
    return None if device is None else try_kernels(device, usual_needs(device)).lacks._asdict()


def _rates(device: str) -> FlopRates:
    from .pass_rates import pass_rates, weight_rates

    return {**weight_rates(device), **(pass_rates() if device == "cpu" else {})}
