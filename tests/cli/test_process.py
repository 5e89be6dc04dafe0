"""What the command line settles before torch is loaded, seen in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
from moedge.cli.options.process import settle
settle()
import torch
buffer = torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
with open("/proc/self/smaps") as maps:
    print(sum(int(line.split()[1]) for line in maps if line.startswith("AnonHugePages")) >> 10)
"""


def large_pages(**environment: str) -> int:
    """MiB of them in a process that has filled a buffer of 64 MiB."""
    plain = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=plain | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(
    not MODES.exists() or "[madvise]" not in MODES.read_text(), reason="large pages are not for the asking"
)
def test_large_buffers_come_in_large_pages_unless_the_user_says_otherwise() -> None:
    assert large_pages() >= 32
    assert large_pages(THP_MEM_ALLOC_ENABLE="0") < 32
