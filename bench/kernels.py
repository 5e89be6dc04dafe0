"""How fast are the Triton kernels, against the bytes or operations that cannot be saved? Needs a GPU.

    python -m bench.kernels

Checks every timed result against float64 too, and names the floor that each kernel is measured by. Every format and
feature is checked by tests/matrix/kernels.py; what kernels compile to, `make kernels` shows without a GPU.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

# Before Triton is imported: only a GPU can run what is compiled.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton

from bench.gpu.report import Report
from matrix import kernels as exact
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import Launch
from moedge.runtime.attention.kernels.launch import attend_launches
from moedge.runtime.attention.kernels.operands import Cut, Side, decode_cut, extend_cut, num_splits
from support.kernels import grouped_cases, paged_cases

HAS_GPU = torch.cuda.is_available()
# Products in bfloat16: probabilities and outputs are rounded to 8 bits.
MOST_ROUNDED = 2e-2
# How many experts of a timed product are compared with float64.
CHECKED = 4
KV_PAIRS = (("native", "native"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
BF16, FP16 = torch.bfloat16, torch.float16
SILU = Gate("silu")


@dataclass(frozen=True)
class Timed:
    """What is launched, the bytes and operations that cannot be saved, and how far the result is from float64."""

    name: str
    launches: list[Launch]
    nbytes: float
    operations: float
    error: float


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


def product_rate() -> float:
    """Operations per second of torch.mm in bfloat16 (float16 before sm80)."""
    dtype = BF16 if torch.cuda.get_device_capability() >= (8, 0) else FP16
    a = torch.randn(4096, 4096, device="cuda", dtype=dtype)
    return 2 * 4096**3 / seconds_of(lambda: torch.mm(a, a))


def seconds_of(run: Callable[[], object]) -> float:
    """The median; caches are emptied between runs."""
    return triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median") / 1000


def timed_attention(capability: tuple[int, int], processors: int = 0) -> Iterator[Timed]:
    """`processors`: of the GPU's multiprocessors, those that kernels are given; 0 for all."""
    dtype = BF16 if capability >= (8, 0) else FP16
    processors = processors or torch.cuda.get_device_properties(0).multi_processor_count
    for head_dim, (keys, values) in itertools.product((64, 128), KV_PAIRS):
        base = paged_cases.Case(keys, values, head_dim, 8, 32, 4, dtype=dtype, native=dtype, device="cuda")
        usual = decode_cut(capability, head_dim, 8, wide=False, kind=paged_cases.kind_of(keys, values))
        for batch, past in ((1, 8191), (16, 2047), (128, 1023)):
            case = replace(base, lengths=((past, 1),) * batch)
            for cut in [usual, *(variants(usual) if batch == 128 and usual.dot else ())]:
                splits = num_splits(batch * 4 * -(-8 // cut.heads), processors, past, cut.keys)
                sizes = f"{cut.keys} keys, {cut.warps} warps, {cut.stages} stages"
                name = f"decode {keys}/{values} head {head_dim}, {batch} x {past + 1}, {splits} splits, {sizes}"
                yield timed_case(name, case, cut, splits, 1)
        if capability >= (8, 0):
            cut = extend_cut(head_dim, 8, wide=False, mixed=keys != values)
            case = replace(base, lengths=((1024, 512), (0, 1024)))
            yield timed_case(f"extend {keys}/{values} head {head_dim}, 1536 rows", case, cut, 1, cut.rows // cut.heads)


def variants(cut: Cut) -> list[Cut]:
    """What else may be faster on a GPU whose shared memory is not the limit: more keys a step, more in flight."""
    wider = cut._replace(keys=2 * cut.keys)
    return [cut._replace(keys=max(32, cut.keys // 2)), cut._replace(stages=3), wider, wider._replace(warps=8)]


def timed_case(name: str, case: paged_cases.Case, cut: Cut, splits: int, tokens: int) -> Timed:
    cache = paged_cases.Cache.make(case)
    launches = attend_launches(cache.q, cache.out, cache.cached, cache.pages(tokens), cache.features, cut, splits)
    for launch in launches:
        launch.run()
    error = paged_cases.relative_error(cache.out, cache.reference())
    stored = sum(sum(length) for length in case.lengths) * case.kv_heads
    widths = [side_nbytes(side) for side in (cache.cached.keys, cache.cached.values)]
    seen = sum(count * (past + (count + 1) / 2) for past, count in case.lengths)
    rows = cache.q.numel() * cache.q.element_size() * 2
    operations = 4 * seen * case.kv_heads * case.group * case.head_dim
    return Timed(name, launches, stored * sum(widths) + rows, operations, error)


def side_nbytes(side: Side) -> float:
    """Bytes of one head of one token."""
    planes = [plane for plane in side[:3] if plane is not None]
    return sum(plane[0, 0].numel() * plane.element_size() for plane in planes) / side.codes.shape[2]


def timed_experts() -> Iterator[Timed]:
    """Qwen3-30B-A3B: 128 experts of 2048 x 768."""
    for format_name, rows in itertools.product(grouped_cases.FORMATS, (1, 4, 16, 64, 256)):
        for name, shape, gate in (("gate and up", (1536, 2048), SILU), ("down", (2048, 768), None)):
            case = grouped_cases.Case(
                format_name, *shape, (rows,) * 128, None, gate, dtype=BF16, device="cuda", copies=True
            )
            product = grouped_cases.Product.make(case)
            launch = product.launch()
            launch.run()
            reference = product.reference(CHECKED)
            error = float((product.out[: len(reference)].cpu().double() - reference).norm() / reference.norm())
            nbytes = sum(matrix.nbytes for matrix in product.matrices) + 2 * (product.x.numel() + product.out.numel())
            operations = 2 * 128 * rows * shape[0] * shape[1]
            yield Timed(f"{name} {format_name}, 128 experts x {rows} rows", [launch], nbytes, operations, error)


class Measured(NamedTuple):
    """A median, the floor, which share of the median it is, and what it is made of."""

    seconds: float
    floor: float
    share: float
    bound: str


def measure(case: Timed, bandwidth: float, rate: float) -> Measured:
    seconds = seconds_of(lambda: [launch.run() for launch in case.launches])
    floors = {"bytes": case.nbytes / bandwidth, "operations": case.operations / rate}
    bound = max(floors, key=floors.__getitem__)
    return Measured(seconds, floors[bound], floors[bound] / seconds, bound)


def run_time() -> int:
    if not HAS_GPU:
        print("no GPU was found; `make matrix` checks the kernels and `make kernels` compiles them without one")
        return 1
    capability, failed = torch.cuda.get_device_capability(), 0
    bandwidth, rate = copy_bandwidth(), product_rate()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s, mm {rate / 1e12:.1f} TFLOP/s")
    print("| kernel | us | floor us | of floor | bound by | relative L2 |\n|---|---|---|---|---|---|")
    cases = itertools.chain(timed_attention(capability), timed_experts() if capability >= (8, 0) else ())
    for case in cases:
        timed = measure(case, bandwidth, rate)
        figures = f"{timed.seconds * 1e6:.1f} | {timed.floor * 1e6:.1f} | {timed.share:.0%} | {timed.bound}"
        print(f"| {case.name} | {figures} | {case.error:.1e} |", flush=True)
        failed += not case.error < MOST_ROUNDED
    return int(failed > 0)


# --- for bench/gpu.sh


def run_kernels(report: Report, fake: bool) -> None:
    """Part `kernels` of bench/gpu.sh: every kernel against float64; on a GPU its time against its floor, too."""
    for kernel in exact.KERNELS:
        report.step("kernels", f"{kernel}, float64", partial(_check, kernel))
    if not fake:
        capability = torch.cuda.get_device_capability()
        report.step("kernels", "attention, time", partial(_time, partial(timed_attention, capability)))
        if capability >= (8, 0):
            report.step("kernels", "experts, time", partial(_time, timed_experts))


def _check(kernel: str) -> dict[str, Any]:
    worst, cases = 0.0, 0
    with torch.inference_mode():
        for case, error in exact.checks(kernel):
            # Not-a-number is no error below the most: asked this way round.
            if not error < exact.MOST_ERROR:
                raise AssertionError(f"relative L2 {error:.1e}, wanted {exact.MOST_ERROR}: {case}")
            worst, cases = max(worst, error), cases + 1
    return {"cases": cases, "worst_relative_l2": worst}


def _time(cases: Callable[[], Iterable[Any]]) -> dict[str, Any]:
    """Medians, and their floors by the rates of a device copy and of torch.mm in this very run."""
    bandwidth, rate, results = copy_bandwidth(), product_rate(), {}
    with torch.inference_mode():
        for case in cases():
            timed = measure(case, bandwidth, rate)
            if not case.error < MOST_ROUNDED:
                raise AssertionError(f"{case.name}: relative L2 {case.error:.1e}")
            results[case.name] = f"{timed.seconds * 1e6:.1f} us {timed.share:.0%} of {timed.bound}"
    return {"bytes_s": bandwidth, "flop_s": rate, "share_of_floor": results}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_grad_enabled(False)
    sys.exit(run_time())
