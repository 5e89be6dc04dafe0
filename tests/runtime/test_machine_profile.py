"""A profile of the whole machine is measured within the memory that it may take."""

import subprocess
import sys
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
