"""Tries GPU kernels in a process of its own, and remembers those that passed.

A kernel that reads beyond its memory leaves its CUDA context unusable: every later call of the process fails, so that
falling back is possible only if the kernel ran in another process (`trial_worker`). Kernels that passed are not tried
again as long as the GPU, torch, Triton and their own source are the same; those that failed are, at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from platformdirs import user_state_path

from ...offload.atomic_file import own_name, write_atomically
from ...offload.device import Device
from ..settings.stages import stage

# Compiling takes seconds a kernel on a slow processor.
TIMEOUT_S = 600.0
# What the line of the result begins with.
RESULT = "trial: "
# A CUDA context takes about half a GiB.
_SIDE_BY_SIDE_NBYTES = 4 << 30
_FILE = "kernel-trials.json"
_MOST_KEPT = 64
_COMMAND = (sys.executable, "-P", "-m", "moedge.runtime.loading.trial_worker")
_SOURCES = ("../../quant/kernels", "../attention/kernels")


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What kernels are tried with: the dtype of a run and its head dimensions."""

    dtype: str
    head_dims: frozenset[int] = frozenset({128})


def try_apart(device: Device, needs: KernelNeeds, families: tuple[str, ...]) -> dict[str, str]:
    """Why the kernels of each family cannot be used, "" if they can: as remembered, or tried in other processes."""
    key, known = _key(device, needs), _remembered()
    lacks = {family: "" for family in families if family in known.get(key, [])}
    left = [family for family in families if family not in lacks]
    if left:
        lacks |= _try_each(device, needs, left)
        _remember({**known, key: [family for family, lack in lacks.items() if not lack]})
    return lacks


def _try_each(device: Device, needs: KernelNeeds, families: list[str]) -> dict[str, str]:
    """A process for each family, side by side where each may have a CUDA context of its own."""
    at_once = len(families) if device.available >= _SIDE_BY_SIDE_NBYTES else 1
    announcement = "compiling GPU kernels and trying them, once for this GPU and these packages (about a minute)"
    with stage("trying GPU kernels", announcement=announcement), ThreadPoolExecutor(at_once) as pool:
        index = device.torch_device.index or 0
        return dict(zip(families, pool.map(partial(run_trial, index, needs), families), strict=True))


def run_trial(index: int, needs: KernelNeeds, family: str) -> str:
    """Why the kernels of a family cannot be used on the GPU of this index, "" if they can."""
    request = json.dumps({"index": index, "dtype": needs.dtype, "heads": sorted(needs.head_dims), "family": family})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [*_COMMAND, request], capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"Triton's kernels do not run here: they took more than {TIMEOUT_S:.0f} seconds"
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return line.removeprefix(RESULT)
    return f"Triton's kernels do not run here: the process that tried them {_death(done.returncode, done.stderr)}"


def _death(code: int, said: str) -> str:
    last = (said.strip().splitlines() or [""])[-1][:160]
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}: {last}"


def _key(device: Device, needs: KernelNeeds) -> str:
    properties = torch.cuda.get_device_properties(device.torch_device)
    facts = (properties.name, device.capability, torch.__version__, _version("triton"), _source_hash())
    return hashlib.sha256(repr((facts, needs.dtype, sorted(needs.head_dims))).encode()).hexdigest()[:32]


@cache
def _source_hash() -> str:
    here, digest = Path(__file__).parent, hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((here / folder).resolve().glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _path() -> Path:
    return user_state_path("moedge") / _FILE


def _remembered() -> dict[str, list[str]]:
    """The families that passed, by key, the newest key last; nothing where the file cannot be read."""
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(each, list) for each in found.values()) else {}


def _remember(known: dict[str, list[str]]) -> None:
    newest = dict(list(known.items())[-_MOST_KEPT:])
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(), json.dumps(newest).encode(), own_name(_path()))
    except OSError:
        # The next start tries the kernels again.
        return
