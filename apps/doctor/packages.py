"""Checks the installed packages against the requirements of moedge, and torch against the driver. Torch-free."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from ...face import Driver, TorchBuild, dotted, unusable_torch
from .finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
