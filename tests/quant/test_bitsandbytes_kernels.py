"""Imported plainly, bitsandbytes downloads and runs a hub's kernel; here a fake `kernels` records the attempt."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from moedge.quant.formats.bitsandbytes_kernels import no_hub

FAKE = """
calls = []

def get_kernel(*args, **kwargs):
    calls.append(args)
    raise RuntimeError("the fake gives no kernel")
"""

SCRIPT = """
import gc
import sys

gc.disable()

sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
sys.path.insert(0, sys.argv[1])
{load}
from bitsandbytes.functional import has_avx512bf16
hidden = "kernels" in sys.modules
import kernels
import logging

heard = not logging.getLogger("bitsandbytes.backends.cpu.ops").disabled
print(len(kernels.calls), len(sockets), bool(has_avx512bf16()), hidden, heard)
"""


def run(load: str, folder: Path) -> list[str]:
    (folder / "kernels.py").write_text(FAKE)
    code = SCRIPT.format(load=load)
    answer = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "get_kernel" not in answer.stderr
    assert "Failed to load" not in answer.stderr or load == "import bitsandbytes"
    return answer.stdout.split()


def test_loading_bitsandbytes_asks_no_hub_and_opens_no_socket(tmp_path: Path) -> None:
    calls, sockets, _, hidden, heard = run(
        "from moedge.quant.formats.bitsandbytes_kernels import load; load()", tmp_path
    )
    assert (calls, sockets, hidden, heard) == ("0", "0", "False", "True")


def test_a_kernels_module_imported_before_is_hidden_and_then_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    present = ModuleType("kernels")
    monkeypatch.setitem(sys.modules, "kernels", present)
    with no_hub(), pytest.raises(ImportError):
        import_module("kernels")
    assert import_module("kernels") is present


@pytest.mark.slow
def test_without_our_loading_the_attempt_is_made(tmp_path: Path) -> None:
    calls, _, has_avx512bf16, _, _ = run("import bitsandbytes", tmp_path)
    if has_avx512bf16 == "False":
        pytest.skip("bitsandbytes makes the attempt only on processors with AVX512-BF16")
    assert calls == "1"
