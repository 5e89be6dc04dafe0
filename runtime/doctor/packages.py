"""Checks the installed packages against the requirements of moedge, and torch against the driver. Torch-free."""

from __future__ import annotations

import ast
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...offload.budget import auto_device, parse_size
from ...offload.machine.hardware import (
    Driver,
    GpuInfo,
    cpu_text,
    find_driver,
    find_gpus,
    gpu_text,
    num_threads,
    shows_gpu,
)
from ..settings.budgets import wants_device, without_device
from .finding import Finding, Verdict, fail, ok, warn

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Builds that pytorch.org offers for the supported releases, newest first: CUDA version and the index's name.
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 6), "cu126"))


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda` is the CUDA version it was built with, None for a build that has none."""

    version: str
    cuda: tuple[int, int] | None


def find_torch() -> TorchBuild | None:
    """Reads its version.py, which an import would take two seconds for; None where torch is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    values = _constants(Path(spec.origin).with_name("version.py").read_text())
    cuda = values.get("cuda")
    return TorchBuild(values.get("__version__") or "", _version_pair(cuda) if cuda else None)


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
        build = "CUDA " + _dotted(torch.cuda) if torch.cuda else "the CPU"
        reason = "no NVIDIA driver" if driver is None else "the NVIDIA driver shows no GPU to this process"
        return ok("torch", f"torch {torch.version} for {build}; {reason}")
    served = f"driver {driver.release or 'of unknown release'} for CUDA up to {_dotted(driver.cuda)}"
    install = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{_index(driver)}"
    if torch.cuda is None:
        return fail("torch", f"torch {torch.version} cannot use the GPU: it was built without CUDA; {served}", install)
    # Within a major version an older driver serves newer builds: CUDA's minor version compatibility.
    if torch.cuda[0] > driver.cuda[0]:
        found = f"torch {torch.version} was built for CUDA {_dotted(torch.cuda)}; {served}"
        return fail("torch", found, f"a newer NVIDIA driver, or {install}")
    return ok("torch", f"torch {torch.version} for CUDA {_dotted(torch.cuda)}, {served}")


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes on a machine. `gpu` is None if the CPU does; then `reason` says why no GPU does."""

    gpu: GpuInfo | None
    reason: str = ""

    def line(self, granted: int = 0) -> str:
        """A line for the head of a command; `granted` are the bytes of the GPU that may be used."""
        where = cpu_text(num_threads(), self.reason) if self.gpu is None else gpu_text(granted, self.gpu)
        return f"computing on {where}"


_MORE = "; `moedge doctor` says more"


def find_computing(wants_gpu: bool = True) -> Computing:
    """What would compute on this machine; imports no torch and opens no device."""
    if not wants_gpu:
        return Computing(None, "--gpu-mem 0")
    driver = find_driver()
    gpus = find_gpus() if driver else ()
    return choose_computing(find_torch(), driver, gpus, undriven=driver is None and shows_gpu())


def choose_computing(
    torch: TorchBuild | None, driver: Driver | None, gpus: Sequence[GpuInfo], undriven: bool = False
) -> Computing:
    """The first GPU where the driver shows one and torch was built for it, else the CPU.

    Who has no GPU is not sent to `moedge doctor`: nothing is to be mended. `undriven` as for `check_torch`.
    """
    if driver is None:
        return Computing(None, f"no NVIDIA driver found{_MORE if undriven else ''}")
    if not gpus:
        return Computing(None, f"the NVIDIA driver shows no GPU to this process{_MORE}")
    finding = check_torch(torch, driver, len(gpus))
    if finding.verdict is Verdict.FAIL:
        return Computing(None, f"{finding.found.partition(';')[0]}{_MORE}")
    return Computing(gpus[0])


def computing_line(gpu_mem: str) -> str:
    """Which device computes on this machine with this much of its memory, and why not the GPU.

    Raises SettingError, BadSize.
    """
    computing = find_computing(wants_device(gpu_mem))
    if computing.gpu is None:
        without_device(gpu_mem)
        return computing.line()
    return computing.line(parse_size(gpu_mem, computing.gpu.nbytes, computing.gpu.nbytes, auto_device))


def _found(need: Requirement, installed: Callable[[str], str]) -> str:
    """Describes the problem of an installed package; "" if there is none."""
    try:
        found = installed(need.name)
    except PackageNotFoundError:
        return f"{need.name} is not installed"
    return "" if need.specifier.contains(found, prereleases=True) else f"{need.name} {found} is installed"


def _constants(source: str) -> dict[str, str | None]:
    """Names that a module gives text or None, without running it."""
    found: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def _version_pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _index(driver: Driver) -> str:
    return next((name for cuda, name in _BUILDS if cuda <= driver.cuda), _BUILDS[-1][1])


def _dotted(pair: tuple[int, int]) -> str:
    return ".".join(map(str, pair))
