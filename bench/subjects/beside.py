"""Experts in order `rows` computed by a CPU while a thread copies: as where others cross a link from the same RAM.

    python -m bench.micro beside --quant int4 nf4 --hidden 2048 --inner 768

One thread copies blocks of a large buffer all the time. Beside it the others, in turn, read memory (memchr), multiply
float32 matrices that stay in their caches, and compute experts of some rows each. Rates are medians of the rounds: of
weights that are read, as a share of what reading alone gives there; of operations, as a share of the products'.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable

import torch

from moedge.quant.formats.format import ROWS, get_format
from moedge.quant.kernels.operands import Gate
from moedge.quant.matmul import rows
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.matmul.tiled import ExpertRows
from moedge.quant.tensor import PackedTensor, pack

BLOCK_NBYTES = 4 << 20
# Of a square matrix that one core's caches hold.
SIDE = 384
_LIBC = ctypes.CDLL(None)
_LIBC.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class Copier:
    """A thread that copies blocks of a buffer into one of their size, as long as it is entered."""

    def __init__(self, enabled: bool, nbytes: int) -> None:
        self._total = max(1, nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        self._from, self._to = torch.zeros(self._total, dtype=torch.uint8), torch.zeros(BLOCK_NBYTES, dtype=torch.uint8)
        self._stopped, self.nbytes = not enabled, 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Copier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        begin = 0
        while not self._stopped:
            ctypes.memmove(self._to.data_ptr(), self._from.data_ptr() + begin, BLOCK_NBYTES)
            self.nbytes += BLOCK_NBYTES
            begin = (begin + BLOCK_NBYTES) % self._total


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quant", nargs="+", default=["int4", "int8", "nf4", "mxfp4", "none"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1, help="that compute; one more copies")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="of weights, and of what is read and copied")
    parser.add_argument("--alone", action="store_true", help="without the copy")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    pool = WorkerPool(options.threads)
    cases: dict[str, tuple[Callable[[], None], int, int]] = {
        "read": _reading(pool, options.mib << 20),
        "product": _multiplying(pool),
    }
    for quant in options.quant:
        for count in options.rows:
            cases[f"{quant} {count}"] = _experts(pool, quant, count, options)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with Copier(not options.alone, options.mib << 20) as copier:
        begun = time.perf_counter()
        for _ in range(options.rounds):
            for name, (work, _, _) in cases.items():
                start = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - start)
        copied = copier.nbytes / (time.perf_counter() - begun)
    took = {name: statistics.median(each) for name, each in seconds.items()}
    read, product = cases["read"][1] / took["read"], cases["product"][2] / took["product"]
    print(
        f"the copy {copied / 1e9:.1f} GB/s; beside it, read {read / 1e9:.1f} GB/s, products {product / 1e9:.0f} GFLOP/s"
    )
    print("| format | rows | GB/s | of reading | GFLOP/s | of products |\n|---|---|---|---|---|---|")
    for name, (_, nbytes, flop) in list(cases.items())[2:]:
        quant, count = name.split()
        rates = nbytes / took[name], flop / took[name]
        print(
            f"| {quant} | {count} | {rates[0] / 1e9:.1f} | {rates[0] / read:.0%} | {rates[1] / 1e9:.0f}"
            f" | {rates[1] / product:.0%} |"
        )


def _reading(pool: WorkerPool, nbytes: int) -> tuple[Callable[[], None], int, int]:
    memory, each = torch.zeros(nbytes, dtype=torch.uint8), nbytes // pool.size
    counter = iter(range(1 << 30))

    def read() -> None:
        _LIBC.memchr(memory.data_ptr() + next(counter) % pool.size * each, 1, each)

    return lambda: pool.call_on_all(read), each * pool.size, 0


def _multiplying(pool: WorkerPool) -> tuple[Callable[[], None], int, int]:
    sides, times = [torch.randn(SIDE, SIDE) for _ in range(2)], 100

    def multiply() -> None:
        out = torch.empty(SIDE, SIDE)
        for _ in range(times):
            torch.mm(*sides, out=out)

    return lambda: pool.call_on_all(multiply), 0, 2 * SIDE**3 * times * pool.size


def _experts(
    pool: WorkerPool, quant: str, count: int, options: argparse.Namespace
) -> tuple[Callable[[], None], int, int]:
    """Experts of `count` rows each, in bfloat16; each has bytes of its own."""
    shapes = ((2 * options.inner, options.hidden), (options.hidden, options.inner))
    layouts = [get_format(quant).in_order(ROWS).layout(shape, "bfloat16") for shape in shapes]
    nbytes = sum(layout.nbytes for layout in layouts)
    planes = [pack(torch.randn(shape).bfloat16() / 32, quant, ROWS).planes for shape in shapes]
    total = max(1, (options.mib << 20) // nbytes)

    def matrix(index: int) -> PackedTensor:
        return PackedTensor(layouts[index], tuple(plane.clone() for plane in planes[index]))

    experts = [ExpertRows(each * count, count, matrix(0), None, matrix(1), None) for each in range(total)]
    hidden = torch.randn(count, options.hidden).bfloat16()
    token_ids = torch.arange(count).repeat(total)
    out = torch.empty(count * total, options.hidden, dtype=torch.bfloat16)
    scratch = torch.empty(count * total * rows.scratch_numbers(*layouts))
    gate = Gate("silu")

    def compute() -> None:
        rows.multiply_experts(hidden, token_ids, experts, gate, out, scratch, pool.call_on_all)

    flop = 2 * count * sum(shape[0] * shape[1] for shape in shapes) * total
    return compute, nbytes * total, flop
