"""Holes between objects that stay are given back (`offload/memory.py`); what a pass uses again is kept.

In processes of their own, because how malloc is set up, and what it holds, is one for a whole process.
"""

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps free memory in this way"
)
MIB = 1 << 20

# Blocks of 64 KiB lie on the heap proper; every second one stays, so that its end cannot shrink.
HOLES = """
import sys
from moedge.offload.memory import Heap
from moedge.offload.memory import host_resident
heap = Heap()
before = host_resident()
blocks = [bytearray(b"x") * (64 << 10) for _ in range(2048)]
del blocks[::2]
for _ in range(2):
    if sys.argv[1] == "watched":
        heap.after_pass()
print(host_resident() - before, heap.num_trims)
"""

PASSES = """
import resource
import sys
import torch
from moedge.offload.memory import Heap, keep_memory, return_memory
keep_memory() if sys.argv[1] == "keep" else return_memory()
def work():
    for _ in range(8):
        torch.empty(4 << 20, dtype=torch.uint8).fill_(1)
work()
heap = Heap()
work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
    heap.after_pass()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, heap.num_trims)
"""


def numbers(program: str, argument: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", program, argument], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    return first, second


@pytest.mark.parametrize(("how", "most", "num_trims"), [("watched", 80, 1), ("alone", 160, 0)])
def test_holes_are_given_back_once_they_pass_what_a_pass_leaves(how: str, most: int, num_trims: int) -> None:
    """64 MiB stay and as much was freed; nobody gives that back without a Heap."""
    grown, trims = numbers(HOLES, how)
    assert most - 80 < grown / MIB < most
    assert trims == num_trims


@pytest.mark.parametrize("how", ["keep", "return"])
def test_a_pass_like_the_one_before_is_given_pages_anew_unless_they_are_kept(how: str) -> None:
    """80 buffers of 1,024 pages each, where pages are small."""
    faults, trims = numbers(PASSES, how)
    assert trims == 0
    assert faults < 80 if how == "keep" else faults >= 80


THREADS = """
import sys
from threading import Thread
from moedge.offload import memory
from moedge.offload.memory import host_resident, keep_memory, return_memory, trim
if sys.argv[1] == "own":
    memory._M_ARENA_MAX = 0
keep_memory()
def work():
    blocks = [bytearray(b"x") * (64 << 10) for _ in range(640)]
before = host_resident()
threads = [Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
return_memory()
trim()
print(host_resident() - before, 0)
"""


@pytest.mark.parametrize(("heaps", "least", "most"), [("one", -8, 8), ("own", 32, 160)])
def test_what_threads_freed_is_returned_because_they_share_a_heap(heaps: str, least: int, most: int) -> None:
    """40 MiB of blocks in each thread: glibc returns nothing of the end of a heap of their own."""
    grown, _ = numbers(THREADS, heaps)
    assert least < grown / MIB < most
