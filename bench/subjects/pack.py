"""How fast are matrices packed, against bitsandbytes, and how far is each format from the weights?

    python -m bench.micro pack [--threads 2] [--repeats 9]

Speeds are medians over rounds in which every candidate takes its turn, so that a busy machine disturbs all alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moedge.quant.formats import bitsandbytes_kernels
from moedge.quant.formats.format import get_format
from moedge.quant.tensor import dtype_name, pack, pack_into
from support.packing_error import relative_error

COLUMNS = (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32))


def packing(weight: Tensor, format_name: str) -> Callable[[], object]:
    layout = get_format(format_name).layout((weight.shape[0], weight.shape[1]), dtype_name(weight.dtype))
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    return lambda: pack_into(weight, layout, buffer)


def seconds_in_turns(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def print_speeds(repeats: int, shape: tuple[int, int]) -> None:
    print(f"{'M weights/s':12}{'nf4':>8}{'bnb nf4':>9}{'ratio':>7}{'int8':>8}{'none':>8}")
    for name, dtype in COLUMNS:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        candidates: dict[str, Callable[[], object]] = {
            "bnb": partial(torch.ops.bitsandbytes.quantize_4bit, weight, 64, "nf4", torch.uint8)
        }
        times = seconds_in_turns(candidates | {key: packing(weight, key) for key in ("nf4", "int8", "none")}, repeats)
        speeds = {key: weight.numel() / statistics.median(values) / 1e6 for key, values in times.items()}
        ratio = statistics.median(bnb / ours for bnb, ours in zip(times["bnb"], times["nf4"], strict=True))
        print(
            f"{name:12}{speeds['nf4']:8.0f}{speeds['bnb']:9.0f}{ratio:7.1f}{speeds['int8']:8.0f}{speeds['none']:8.0f}"
        )


def distance(back: Tensor, weight: Tensor) -> float:
    return float((back.double() - weight.double()).norm() / weight.double().norm())


def nf4_error(weight: Tensor, absmax_dtype: torch.dtype) -> float:
    """With absmax stored in this dtype."""
    codes, absmax = torch.ops.bitsandbytes.quantize_4bit(weight, 64, "nf4", torch.uint8)
    rounded = absmax.to(absmax_dtype).float()
    back = torch.ops.bitsandbytes.dequantize_4bit(codes, rounded, 64, "nf4", weight.shape, torch.float32)
    return distance(back, weight)


def int8_error(weight: Tensor, scale_dtype: torch.dtype) -> float:
    """With scales rounded to this dtype after the codes were chosen."""
    codes, scales = pack(weight, "int8").planes
    return distance(codes.float() * scales.to(scale_dtype).float()[:, None], weight)


def print_errors(shape: tuple[int, int]) -> None:
    print(f"\n{'relative L2 error':32}" + "".join(f"{name:>10}" for name, _ in COLUMNS))
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    # Student's t with 5 degrees of freedom: outliers as trained weights have them.
    heavy = torch.distributions.StudentT(5.0).sample(shape)
    kinds = {"N(0, 0.02)": normal * 0.02, "Student t5 * 0.02": heavy * 0.02, "N(0, 1e-6)": normal * 1e-6}
    for kind, weights in kinds.items():
        stored = [weights.to(dtype) for _, dtype in COLUMNS]
        rows = {name: [relative_error(w, pack(w, name)) for w in stored] for name in ("none", "int8", "nf4", "mxfp4")}
        for name, dtype in COLUMNS:
            rows[f"int8, {name} scales"] = [int8_error(w, dtype) for w in stored]
            rows[f"nf4, {name} absmax"] = [nf4_error(w, dtype) for w in stored]
        print(kind)
        for row, errors in sorted(rows.items()):
            print(f"  {row:30}" + "".join(f"{error:10.6f}" for error in errors))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrix")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    bitsandbytes_kernels.load()
    print_speeds(options.repeats, (options.size, options.size))
    print_errors((options.size, options.size))
