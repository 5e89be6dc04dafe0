"""How many operations a second the CPU library's kernels reach on codes, by format, arithmetic and number of rows.

Two operations a weight and row; the best of several rounds, on all of torch's threads, for a matrix that fits a cache.
To compare two trees, run it from each in turn several times: another guest's load changes figures by a third.
"""

from __future__ import annotations

import argparse
import time

import torch

from moedge.quant.formats.format import TILES, get_format
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.native import library
from moedge.quant.tensor import pack_into

ROWS = (1, 2, 3, 4, 6, 8, 16, 64, 384)
SCRATCH_NBYTES = 64 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=int, nargs=2, metavar=("N", "K"), default=(1536, 2048))
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--repeats", type=int, default=7)


def run(options: argparse.Namespace) -> None:
    threads = torch.get_num_threads()
    print(f"matrix {list(options.shape)}, {threads} threads, kernels of {library.loaded().isa}; GFLOP/s by rows")
    print("format", "arithmetic", *ROWS, sep="\t")
    for name in options.formats:
        for integer in (False, True):
            scratch = [Workspace(SCRATCH_NBYTES) for _ in range(threads)]
            products = ParallelMatmul(scratch[0], integer=integer, helpers=scratch[1:])
            rates = (_gigaflops(products, name, rows, options) for rows in ROWS)
            print(name, "int8" if integer else "float", *(f"{rate:.0f}" for rate in rates), sep="\t", flush=True)


def _gigaflops(products: ParallelMatmul, name: str, rows: int, options: argparse.Namespace) -> float:
    layout = get_format(name).in_order(TILES).layout(tuple(options.shape), "bfloat16")
    weights = torch.randn(options.shape, dtype=torch.bfloat16)
    matrix = pack_into(weights, layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    x = torch.randn(rows, options.shape[1], dtype=torch.bfloat16)
    calls, best = max(1, 60 // rows), float("inf")
    products.linear(x, matrix)
    for _ in range(options.repeats):
        start = time.perf_counter()
        for _ in range(calls):
            products.linear(x, matrix)
        best = min(best, (time.perf_counter() - start) / calls)
    return 2 * rows * weights.numel() / best / 1e9
