"""A profile of the whole machine (`runtime/calibration/machine_profile.py`) is measured within the memory that it may
take.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moedge.offload.machine.hardware import find_hardware
from moedge.offload.machine.profile import Disk, DiskRead, LoadingRates
from moedge.offload.machine.speeds import measure_disk
from moedge.runtime.calibration import machine_profile as measuring
from moedge.runtime.calibration.pass_rates import faster

MIB = 1 << 20


def test_a_whole_machine_is_measured_within_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_disk", lambda folder: measure_disk(folder, 8 * MIB, 0.001, (MIB,), (1,)))
    sizes: list[int] = []
    monkeypatch.setattr(measuring, "measure_memory", lambda nbytes: sizes.append(nbytes) or 1e9)
    hardware = find_hardware(tmp_path)
    rates = {"none": {1: 1e9}}
    machine = measuring.measure_machine(tmp_path / "new", hardware, lambda device: rates, most_nbytes=100 * MIB)
    assert (machine.hardware, machine.flop_s, sizes) == (hardware, rates, [100 * MIB])
    assert machine.torch == torch.__version__
    assert machine.disk is not None
    assert not (tmp_path / "new").exists()


def test_what_lasts_a_moment_is_measured_in_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of loading the better rate, which nothing disturbed; of the disk the mean, whose slow seconds are its own."""
    quick, slow = LoadingRates(2e9, {"none": 3e9, "int8": 1e9}), LoadingRates(1e9, {"none": 4e9, "int8": 2e9})
    assert faster(quick, slow) == LoadingRates(2e9, {"none": 4e9, "int8": 2e9})
    disk = Disk(True, 1, (DiskRead(1, 1, 2e9),), cold_bytes_s=1e9)
    monkeypatch.setattr(measuring, "measure_cold_reads", lambda files, way: 5e8)
    found = measuring._read_again(disk, tmp_path, [])
    assert found is not None
    assert found.cold_bytes_s == 7.5e8
    assert measuring._read_again(replace(disk, cold_bytes_s=None), tmp_path, []).cold_bytes_s is None  # type: ignore[union-attr]
    monkeypatch.setattr(measuring, "measure_cold_reads", lambda files, way: None)
    assert measuring._read_again(disk, tmp_path, []) == disk


def test_looking_for_a_profile_imports_no_torch() -> None:
    code = "import sys; from moedge.runtime.calibration import machine_profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A job that is long by its plan, on a machine that was never measured, by measurements as short as can be.
JOB = """
import sys
from pathlib import Path
import moedge
from moedge.offload.machine.profile import saved_path
from moedge.offload.machine.speeds import measure_disk
from moedge.runtime.calibration import machine_profile, pass_rates
from moedge.runtime.jobs import job_plan
from moedge.runtime.settings import settings

model, folder, ram = sys.argv[1:]
machine_profile.measure_disk = lambda root: measure_disk(root, 8 << 20, 0.001, (1 << 20,), (1,))
pass_rates._SECONDS = pass_rates._SECONDS_EACH = job_plan.LONG_SECONDS = 0.0
# As where another job or a cgroup leaves no more.
settings.host_available = lambda: 1 << 30
rows = Path(folder, f"{ram}.jsonl")
rows.write_text('{"prompt": "hi", "max_tokens": 2}')
done = moedge.run_batch(model, rows, f"{rows}.out", ram=ram, progress=False)
print(done.rows.ok, saved_path().exists())
"""


@pytest.mark.parametrize(("short", "measured"), [(MIB, False), (0, True)])
def test_a_job_in_little_memory_measures_within_it(
    short: int, measured: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Or not at all: it would be refused for a peak that is not its own. The job itself says if it took more."""
    ram = f"{(measuring.MEASURING_NBYTES - short) // MIB}MiB"
    command = [sys.executable, "-c", JOB, str(checkpoint("llama")), str(tmp_path), ram]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1", str(measured)], done.stderr
