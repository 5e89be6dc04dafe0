"""Everything that `moedge doctor` checks, in the order in which a person fixes it."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...face import (
    SCHEMA,
    Machine,
    disk_free,
    disk_of,
    find_driver,
    find_gpu_states,
    find_torch,
    host_available,
    host_total,
    last_runs,
    machine_profile,
    measure_cache_reads,
    saved_path,
    saved_profile,
    shows_gpu,
)
from .host import (
    Finding,
    Verdict,
    check_cache_reads,
    check_confinement,
    check_hub_cache,
    check_memory,
    check_open_files,
    check_packages,
    check_state,
    check_stores,
    check_torch,
    fail,
    find_host_memory,
    gpu_state_findings,
    not_measured,
    prediction_findings,
    speed_findings,
)


@dataclass(frozen=True, slots=True)
class Examination:
    """`machine` is None where nothing was measured, now or before; `stores` is the folder of the measured disk."""

    findings: tuple[Finding, ...]
    machine: Machine | None
    stores: Path

    def count(self, verdict: Verdict) -> int:
        return sum(finding.verdict is verdict for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """A profile file with this machine, its findings and its free memory and disk now: docs/reference.md."""
        return {
            "schema": SCHEMA,
            "machines": [] if self.machine is None else [self.machine.to_json()],
            "findings": [asdict(finding) for finding in self.findings],
            "now": {
                "host_total_nbytes": host_total(),
                "host_available_nbytes": host_available(),
                "disk_free_nbytes": disk_free(self.stores),
            },
        }


def examine(stores: Path, quick: bool = False, say: Callable[[str], None] = lambda doing: None) -> Examination:
    """Checks this machine, and measures it again unless `quick`, which imports no torch.

    `stores` is the folder for packed weights; `say` is called with each step.
    """
    torch, driver = find_torch(), find_driver()
    # Before this process takes memory of the GPU itself.
    states = find_gpu_states() if driver else ()
    gpus = len(states)
    findings = [
        check_packages(),
        check_torch(torch, driver, gpus, undriven=driver is None and shows_gpu()),
        *_machine(stores),
    ]
    if quick:
        machine = saved_profile(stores)
    else:
        findings += _try_kernels(bool(gpus), say) if torch else []
        machine, failures = _measure(stores, say) if torch else (None, [])
        findings += failures
        # Data was copied over the link a moment ago: it is as fast as it gets.
        states = tuple(replace(one, link=now.link) for one, now in zip(states, find_gpu_states(), strict=False))
        findings += _cache_reads(stores, say)
    copied = not quick and machine is not None and machine.link is not None
    findings += gpu_state_findings(states, busy=copied)
    if machine is None:
        findings.append(not_measured())
    else:
        findings += speed_findings(machine, machine.torch if torch is None else torch.version)
    findings += prediction_findings(last_runs())
    return Examination(tuple(findings), machine, stores)


def _machine(stores: Path) -> list[Finding]:
    from huggingface_hub import constants

    return [
        check_memory(find_host_memory()),
        check_open_files(),
        check_confinement(),
        check_stores(stores),
        *check_hub_cache(Path(constants.HF_HUB_CACHE), constants.HF_HUB_OFFLINE),
        check_state(saved_path()),
    ]


def _try_kernels(gpu: bool, say: Callable[[str], None]) -> list[Finding]:
    say("trying kernels")
    from ...face import find_device
    from .kernels import check_bitsandbytes, check_formats, check_gpu, check_kernels, check_native

    found = [check_bitsandbytes("cpu"), check_native(), check_formats()]
    if gpu:
        finding = check_gpu()
        found.append(finding)
        if finding.verdict is not Verdict.FAIL:
            found.append(check_bitsandbytes("cuda"))
            found += check_kernels(device) if (device := find_device()) else []
    return found


def _cache_reads(stores: Path, say: Callable[[str], None]) -> list[Finding]:
    """Of a model cache on another disk than `stores`, whose disk is measured already."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if disk_of(cache) == disk_of(stores):
        return []
    say("measuring the disk of the model cache")
    return [check_cache_reads(cache, measure_cache_reads(cache))]


def _measure(stores: Path, say: Callable[[str], None]) -> tuple[Machine | None, list[Finding]]:
    say("measuring disk, memory and compute: about 15 seconds")
    try:
        return machine_profile(stores, again=True), []
    except OSError as error:
        user = os.environ.get("USER", "this user")
        return None, [fail("measuring", f"stopped: {error} (as {user})", "give --disk-dir a writable folder")]
