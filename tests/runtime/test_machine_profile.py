"""A profile of the whole machine is measured within the memory that it may take."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moedge.offload.machine.disk import measure_disk
from moedge.offload.machine.hardware import find_hardware
from moedge.runtime.calibration import machine_profile as measuring

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


def test_looking_for_a_profile_imports_no_torch() -> None:
    code = "import sys; from moedge.runtime.calibration import machine_profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
