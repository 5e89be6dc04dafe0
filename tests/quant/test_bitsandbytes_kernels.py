"""Imported plainly, bitsandbytes downloads and runs a hub's kernel; here a fake `kernels` records the attempt."""

import subprocess
import sys
from pathlib import Path

import pytest

FAKE = """
calls = []

def get_kernel(*args, **kwargs):
    calls.append(args)
    raise RuntimeError("the fake gives no kernel")
"""

SCRIPT = """
import sys

sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
sys.path.insert(0, sys.argv[1])
before = sys.modules.get("kernels")
{load}
from bitsandbytes.functional import has_avx512bf16
during = sys.modules.get("kernels")
import kernels
import logging

heard = not logging.getLogger("bitsandbytes.backends.cpu.ops").disabled
print(len(kernels.calls), len(sockets), bool(has_avx512bf16()), during is before, heard)
"""


def run(load: str, folder: Path) -> list[str]:
    (folder / "kernels.py").write_text(FAKE)
    code = SCRIPT.format(load=load)
    answer = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "get_kernel" not in answer.stderr
    assert "Failed to load" not in answer.stderr or load == "import bitsandbytes"
    return answer.stdout.split()


def test_loading_bitsandbytes_asks_no_hub_and_opens_no_socket(tmp_path: Path) -> None:
    calls, sockets, _, restored, heard = run("from moedge.quant.bitsandbytes_kernels import load; load()", tmp_path)
    assert (calls, sockets, restored, heard) == ("0", "0", "True", "True")


def test_a_kernels_module_imported_before_is_there_after(tmp_path: Path) -> None:
    load = "import kernels; before = kernels; from moedge.quant.bitsandbytes_kernels import load; load()"
    calls, sockets, _, restored, _ = run(load, tmp_path)
    assert (calls, sockets, restored) == ("0", "0", "True")


def test_without_our_loading_the_attempt_is_made(tmp_path: Path) -> None:
    calls, _, has_avx512bf16, _, _ = run("import bitsandbytes", tmp_path)
    if has_avx512bf16 == "False":
        pytest.skip("bitsandbytes makes the attempt only on processors with AVX512-BF16")
    assert calls == "1"


def test_packing_and_sizes_do_not_import_bitsandbytes() -> None:
    code = (
        "import sys, torch; from moedge.quant.tensor import pack; pack(torch.ones(1, 64), 'nf4');"
        "print('bitsandbytes' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
