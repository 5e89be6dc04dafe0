"""How long does a product with a packed matrix take, for few rows and many, fast and deterministic?

    python -m bench.micro linear [--threads 2] [--repeats 15] [--shape 1024 2048] [--dtype bfloat16]
        [--only-layer] [--only-kept] [--only-integers] [--only-widened]

Prints microseconds, the best of rounds in which every candidate takes its turn:
1. the products of Matmul beside torch.mm over a plain matrix of the same dtype, and bitsandbytes' own NF4 product;
2. a layer of 64 experts of qwen3_moe's shapes, computed by the pool, with the order of codes that kernels here read and
   with codes row after row;
3. the same layer with codes that a checkpoint has, beside the own formats that they replace: int4 in groups of 128
   and 32 beside int4, nf4 with float32 scales and mxfp4 beside nf4;
4. the same layer where activations are rounded to int8, too (`--compute int8`), beside activations as they are;
5. widening alone, from codes to bfloat16 on one thread, and the same layer where codes are widened before every
   product: nf4 beside mxfp4;
6. the measurements that TILE and STRIP_WEIGHTS were chosen by, and measure_gemv_max_rows: up to how many rows kernels
   on codes are faster than dequantizing first.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from moedge.quant import scratch
from moedge.quant.formats import bitsandbytes_kernels
from moedge.quant.formats.format import QUANT_FORMATS, get_format
from moedge.quant.matmul.matmul import Matmul, ParallelMatmul, Workspace, kernel_order, measure_gemv_max_rows
from moedge.quant.matmul.thread_pool import torch_threads
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import PackedTensor, dtype_name, pack
from support.kernels.relayout import from_planes
from support.random_planes import random_planes

ROWS = (1, 4, 8, 12, 16, 32, 64, 256)
# A layer's experts, and the rows of each.
NUM_EXPERTS = 64
EXPERT_SHAPES = ((1024, 2048), (2048, 512))
LAYER_ROWS = (1, 4, 8, 16, 32, 64, 128)
# Behind the name of a format whose products round activations to int8.
INTEGERS = " x int8"
Candidates = dict[str, Callable[[], object]]


def best_times(candidates: Candidates, repeats: int) -> dict[str, float]:
    """Microseconds of each candidate."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: min(values) for name, values in times.items()}


def compute_for(packed: PackedTensor, dtype: torch.dtype, deterministic: bool) -> ParallelMatmul:
    return ParallelMatmul(Workspace(scratch_nbytes(packed.layout, dtype_name(dtype), deterministic)), deterministic)


def bitsandbytes_product(x: Tensor, codes: Tensor, absmax: Tensor, shape: tuple[int, int]) -> Tensor:
    return linear(x, torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, 64, "nf4", shape, x.dtype))


def tiled(x: Tensor, weight: Tensor, tile: int) -> list[Tensor]:
    """Products of `tile` rows each, as many as cover x."""
    return [torch.mm(x[:tile], weight.t()) for _ in range(0, len(x), tile)]


def print_table(title: str, rows: dict[str, dict[str, float]], digits: int = 0) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n{'rows':>8}" + "".join(f"{column:>{max(9, len(column) + 2)}}" for column in columns))
    for name, values in rows.items():
        print(f"{name:>8}" + "".join(f"{values[column]:{max(9, len(column) + 2)}.{digits}f}" for column in columns))


def print_products(weight: Tensor, repeats: int) -> None:
    packed = {name: pack(weight, name) for name in ("none", "int8", "int4", "nf4", "mxfp4")}
    codes, absmax = packed["nf4"].planes
    wide = absmax.float()
    computes = {(name, det): compute_for(packed[name], weight.dtype, det) for name in packed for det in (False, True)}
    rows = {}
    for num_rows in ROWS:
        x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
        candidates: Candidates = {"mm": partial(torch.mm, x, weight.t())}
        for (name, deterministic), compute in computes.items():
            candidates[name + " tiled" * deterministic] = partial(compute.linear, x, packed[name])
        candidates["int8 x int8"] = partial(Matmul(Workspace(0), integer=True).linear, x, packed["int8"])
        candidates["bnb nf4"] = partial(bitsandbytes_product, x, codes, wide, packed["nf4"].shape)
        rows[str(num_rows)] = best_times(candidates, repeats)
    print_table("products (us)", rows)


def print_kept(repeats: int, threads: int) -> None:
    """Milliseconds of a layer's experts, in the orders of codes that a model would be loaded in here."""
    chosen = ("int4", "int4-g128-f16-zp", "int4-g128-bf16", "int4-g32-f16", "q4_k", "nf4", "nf4-f32", "mxfp4-e8m0")
    orders: dict[str, str | None] = {name: kernel_order(name, torch.bfloat16, "cpu") for name in chosen}
    print(f"orders of codes: {', '.join(f'{name} {order}' for name, order in orders.items())}")
    print_experts(orders, repeats, threads)


def print_integers(repeats: int, threads: int) -> None:
    """Milliseconds of a layer's experts with activations as they are and rounded to int8."""
    names = ("int8", "int4", "mxfp4", "int3", "vq2")
    orders = {name: kernel_order(name, torch.bfloat16, "cpu") for name in names}
    print_experts({f"{name}{way}": orders[name] for name in names for way in ("", INTEGERS)}, repeats, threads)


def print_widened(repeats: int, threads: int) -> None:
    """Formats with codes row after row: microseconds to widen a matrix, and milliseconds of a layer's experts."""
    names = ("nf4", "nf4-f32", "mxfp4", "mxfp4-e8m0")
    rows = {}
    with torch_threads(1):
        for shape in EXPERT_SHAPES:
            wide = torch.empty(shape, dtype=torch.bfloat16)
            # As many as do not fit the caches, so that codes come from memory.
            many = {name: [_packed(name, shape, "rows") for _ in range(NUM_EXPERTS)] for name in names}
            times = best_times({name: partial(_widen, each, wide) for name, each in many.items()}, repeats)
            rows[f"{shape[0]}x{shape[1]}"] = {name: value / NUM_EXPERTS for name, value in times.items()}
    print_table("widening one matrix (us)", rows)
    print_experts({f"{name} rows": "rows" for name in names}, repeats, threads)


def _widen(matrices: list[PackedTensor], out: Tensor) -> None:
    for matrix in matrices:
        matrix.dequantize(out)


def print_tiles(weight: Tensor, repeats: int) -> None:
    rows = {}
    for num_rows in (1, 64, 256):
        x = torch.randn(max(num_rows, 64), weight.shape[1]).to(weight.dtype)
        candidates: Candidates = {"mm": partial(torch.mm, x[:num_rows], weight.t())}
        for tile in (8, 16, 32, 64):
            candidates[f"tile {tile}"] = partial(tiled, x if num_rows > 1 else x[:tile], weight, tile)
        rows[str(num_rows)] = best_times(candidates, repeats)
    print_table("tiles over a plain matrix (us)", rows)


def print_layer(repeats: int, threads: int) -> None:
    """Milliseconds of a layer's experts by rows of each; the products of `nf4 rows` dequantize strips first."""
    orders = {name: kernel_order(name, torch.bfloat16, "cpu") for name in ("int8", "int4", "nf4")}
    print_experts({"none": None, **orders, "nf4 rows": "rows"}, repeats, threads)


def print_experts(orders: dict[str, str | None], repeats: int, threads: int) -> None:
    """`orders` has the order of codes by format, whose name may be followed by another word."""
    layers = {name: [_expert(name.split()[0], order) for _ in range(NUM_EXPERTS)] for name, order in orders.items()}
    rows = {}
    for num_rows in LAYER_ROWS:
        x = torch.randn(num_rows, EXPERT_SHAPES[0][1]).bfloat16()
        candidates: Candidates = {}
        for name, experts in layers.items():
            nbytes = max(scratch_nbytes(each.layout, "bfloat16", False) for each in experts[0])
            helpers = [Workspace(nbytes) for _ in range(threads - 1)]
            integer = name.endswith(INTEGERS)
            limits = measure_gemv_max_rows(name.split()[0], integer)
            compute = ParallelMatmul(Workspace(nbytes), integer=integer, gemv_max_rows=limits, helpers=helpers)
            candidates[name] = partial(compute.parallel_for, experts, partial(_multiply_expert, x))
        times = best_times(candidates, repeats)
        rows[str(num_rows)] = {name: microseconds / 1e3 for name, microseconds in times.items()}
    print_table(f"{NUM_EXPERTS} experts of {EXPERT_SHAPES} (ms)", rows, digits=1)


def _expert(format_name: str, order: str | None) -> list[PackedTensor]:
    return [_packed(format_name, shape, order) for shape in EXPERT_SHAPES]


def _packed(format_name: str, shape: tuple[int, int], order: str | None) -> PackedTensor:
    if format_name not in QUANT_FORMATS:
        return from_planes(format_name, random_planes(get_format(format_name), shape), "bfloat16", order)
    return pack(torch.randn(shape).bfloat16(), format_name, order)


def _multiply_expert(x: Tensor, expert: list[PackedTensor], products: Matmul) -> None:
    gate, up = products.linear(x, expert[0]).chunk(2, 1)
    products.linear(silu(gate) * up, expert[1])


def print_gemv_max_rows(weight: Tensor, repeats: int, name: str) -> None:
    packed = pack(weight, name)
    workspace = Workspace(scratch_nbytes(packed.layout, dtype_name(weight.dtype), False))
    rows = {}
    for num_rows in (1, 4, 8, 12, 16, 24, 32, 48):
        x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
        candidates: Candidates = {
            "kernel": partial(Matmul(workspace, gemv_max_rows={name: num_rows}).linear, x, packed),
            "widened": partial(Matmul(workspace, gemv_max_rows={}).linear, x, packed),
        }
        rows[str(num_rows)] = best_times(candidates, repeats)
    print_table(f"{name}: torch's kernel or widened (us); measured: up to {measure_gemv_max_rows(name)} rows", rows)


def print_strips(weight: Tensor, repeats: int) -> None:
    packed = pack(weight, "nf4")
    rows: dict[str, dict[str, float]] = {"16": {}, "256": {}}
    for exponent in (19, 20, 21, 22, 23, 24):
        scratch.STRIP_WEIGHTS = 1 << exponent
        compute = compute_for(packed, weight.dtype, False)
        for num_rows, values in rows.items():
            x = torch.randn(int(num_rows), weight.shape[1]).to(weight.dtype)
            values |= best_times({f"2^{exponent}": partial(compute.linear, x, packed)}, repeats)
    print_table(f"nf4 by weights per strip, {len(weight)} x {len(weight)} (us)", rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=2, default=(1024, 2048), metavar=("N", "K"))
    parser.add_argument("--strips", type=int, default=4096, help="rows and columns of the matrix cut into strips")
    parser.add_argument("--only-layer", action="store_true", help="only the layer of experts")
    parser.add_argument("--only-kept", action="store_true", help="only codes that checkpoints have")
    parser.add_argument("--only-integers", action="store_true", help="only activations that are rounded to int8")
    parser.add_argument("--only-widened", action="store_true", help="only codes that are widened before products")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    bitsandbytes_kernels.load()
    matrix = torch.randn(*options.shape).to(getattr(torch, options.dtype))
    print(f"{options.dtype} {list(options.shape)}, {options.threads} threads")
    if options.only_integers:
        print_integers(options.repeats, options.threads)
        return
    if not options.only_kept and not options.only_widened:
        print_layer(options.repeats, options.threads)
    if options.only_layer:
        return
    if not options.only_widened:
        print_kept(options.repeats, options.threads)
    if options.only_kept:
        return
    if not options.only_widened:
        print_integers(options.repeats, options.threads)
    print_widened(options.repeats, options.threads)
    if options.only_widened:
        return
    print_products(matrix, options.repeats)
    print_tiles(matrix, options.repeats)
    for name in ("int8", "int4"):
        print_gemv_max_rows(matrix, options.repeats, name)
    print_strips(torch.randn(options.strips, options.strips).to(matrix.dtype), options.repeats)
