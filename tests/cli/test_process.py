"""What the command line settles before torch is loaded (`cli/main.py`, `api/computing.py`), seen in a
process of its own.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moedge.cli import main
from moedge.computing import ALLOCATOR, ALLOCATOR_VARIABLES, DESCRIPTORS, PRIMITIVES, settle
from moedge.offload import memory

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
from moedge.computing import settle
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


# As many products as a job meets in a few hundred passes: bf16 rows, each time another number of them.
PRODUCTS = """
from moedge.computing import settle
settle()
import ctypes
import torch

class Counts(ctypes.Structure):
    _fields_ = [(f"number{index}", ctypes.c_size_t) for index in range(10)]

# `uordblks` of mallinfo2(3): the bytes that are in use.
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Counts
torch.set_num_threads(1)
weight, rows = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(1000, 16, dtype=torch.bfloat16)
for count in range(1, len(rows)):
    torch.mm(rows[:count], weight)
    if count == 350:
        before = mallinfo2().number7
print(mallinfo2().number7 - before >> 20)
"""
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc from 2.33 on counts its bytes")
def test_products_of_ever_other_shapes_do_not_take_ever_more_memory() -> None:
    """650 of them would add 330 MiB where oneDNN compiles them, which it does on CPUs with AVX-512."""
    plain = {name: value for name, value in os.environ.items() if name not in CACHES}
    run = subprocess.run([sys.executable, "-c", PRODUCTS], env=plain, capture_output=True, text=True, check=True)
    assert int(run.stdout) <= 16


def test_caches_of_products_are_bounded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settle()
    assert [int(os.environ[name]) for name in CACHES] == [PRIMITIVES, DESCRIPTORS]
    os.environ.update(dict.fromkeys(CACHES, "77"))
    settle()
    assert [os.environ[name] for name in CACHES] == ["77", "77"]


@pytest.mark.skipif(
    not MODES.exists() or "[madvise]" not in MODES.read_text(), reason="large pages are not for the asking"
)
def test_large_buffers_come_in_large_pages_unless_the_user_says_otherwise() -> None:
    assert large_pages() >= 32
    assert large_pages(THP_MEM_ALLOC_ENABLE="0") < 32


def test_the_collector_does_not_walk_through_everything_at_the_end() -> None:
    code = (
        "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "from moedge.cli.main import main\nimport sys\nsys.argv = ['moedge', '--version']\nmain()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "True"


def settled(monkeypatch: pytest.MonkeyPatch, **said: str) -> list[str | None]:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settle()
    return [os.environ.get(name) for name in ALLOCATOR_VARIABLES]


def test_device_memory_comes_in_segments_that_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ALLOCATOR_VARIABLES == ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    assert settled(monkeypatch) == [ALLOCATOR] * 2 == ["expandable_segments:True"] * 2
    assert settled(monkeypatch, PYTORCH_ALLOC_CONF="backend:native") == ["backend:native", None]
    assert settled(monkeypatch, PYTORCH_CUDA_ALLOC_CONF="") == [None, ""]


def test_benches_on_a_gpu_take_the_allocator_s_settings_from_where_users_do() -> None:
    bench = Path(__file__).parents[2] / "bench"
    assert not [
        path for path in bench.rglob("*.*") if path.suffix in {".sh", ".py"} and "ALLOC_CONF" in path.read_text()
    ]
    main = (bench / "gpu" / "__main__.py").read_text()
    assert 0 < main.index("\nsettle()\n") < main.index("\nimport torch\n")


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    """The command line that is imported is one that presses it."""
    program = """
import os, signal, sys, types
def press():
    os.kill(os.getpid(), signal.SIGINT)
sys.modules["moedge.cli.main"] = types.SimpleNamespace(main=press)
signal.signal(signal.SIGINT, signal.default_int_handler)
from moedge.__main__ import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_torch_that_a_limit_keeps_out_is_a_refusal_and_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ImportError("/v/site-packages/torch/_C.so: failed to map segment from shared object")

    monkeypatch.setattr(main, "app", load)
    # What it settles for its own process.
    for name in ("settle", "return_memory"):
        monkeypatch.setattr(main, name, lambda: None)
    monkeypatch.setattr(main.atexit, "register", lambda call: None)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (900 << 20, resource.RLIM_INFINITY))
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 4
    assert "moedge: torch cannot be loaded within the limit on address space (ulimit -v) of 900 MiB and data" in said


def test_a_forked_process_of_a_library_ends_without_a_word() -> None:
    script = """
import os, signal
from moedge.cli.options.signals import StopSignals
with StopSignals():
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    _, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"{-signal.SIGTERM}\n", "")
