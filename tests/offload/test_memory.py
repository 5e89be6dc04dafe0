"""What the process used and may use, by the kernel's own numbers."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from moedge.offload.memory import host_available, host_peak, host_resident, host_total

MIB = 1 << 20


def test_nothing_is_available_that_the_machine_does_not_have() -> None:
    assert 0 < host_available() <= host_total() <= psutil.virtual_memory().total


def test_the_peak_sees_memory_that_is_gone() -> None:
    before = host_resident()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    assert host_peak() >= before + 60 * MIB


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_the_process_s_own_limits_bind(kind: int, tmp_path: Path) -> None:
    code = (
        "import resource\nfrom pathlib import Path\nfrom moedge.offload.memory import host_available, host_total\n"
        f"resource.setrlimit({kind}, ({900 * MIB}, {900 * MIB}))\n"
        f"print(host_total(Path({str(tmp_path)!r})), host_available(Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    total, available = map(int, done.stdout.split())
    assert total == 900 * MIB
    assert 0 < available < total


def test_looking_at_the_machine_imports_no_torch() -> None:
    code = (
        "import sys\nfrom moedge.offload import budget, memory\n"
        "from moedge.offload.machine import hardware, profile, speeds\n"
        "memory.host_available(), hardware.find_gpus()\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
