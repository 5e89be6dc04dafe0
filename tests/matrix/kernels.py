"""Do the Triton kernels compute what they should? Every format, kernel and feature against float64.

Runs in Triton's interpreter, or compiled where there is a GPU. How fast they are, bench/kernels.py measures on a GPU;
what they compile to, `make kernels` shows without one.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

HAS_GPU = torch.cuda.is_available()
# Before Triton is imported: only a GPU can run what is compiled.
os.environ["TRITON_INTERPRET"] = "0" if HAS_GPU else "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from matrix.state import Part
from moedge.quant.kernels.operands import Gate
from support.kernels import grouped_cases, paged_cases

# Relative L2 in float32.
MOST_ERROR = 2e-6
STORE, GROUPED = "store", "grouped product"
KERNELS = (*paged_cases.KERNELS, STORE, GROUPED)
QUICK_STEP = 30


def parts(quick: bool) -> Iterator[Part]:
    torch.set_grad_enabled(False)
    for kernel in KERNELS:
        yield Part(kernel, partial(faults, kernel, QUICK_STEP if quick else 1))


def faults(kernel: str, step: int = 1) -> list[str]:
    """Cases whose error is too large. Prints how many there were and the worst error."""
    found, count, worst = [], 0, 0.0
    for case, error in checks(kernel, step):
        count, worst = count + 1, max(worst, error)
        if not error < MOST_ERROR:
            found.append(f"{error:.1e} {case}")
    print(f"  {count} cases, worst relative L2 {worst:.1e}", flush=True)
    return found


def checks(kernel: str, step: int = 1) -> Iterator[tuple[object, float]]:
    """(case, relative error) of every `step`-th case of a kernel: all formats and features, sizes in turn."""
    device = "cuda" if HAS_GPU else "cpu"
    cases = {GROUPED: grouped, STORE: stored}.get(kernel, partial(paged, kernel))
    for case, error in itertools.islice(cases(device), 0, None, step):
        yield case, error()


def grouped(device: str) -> Iterator[tuple[object, Callable[[], float]]]:
    gates = (None, Gate("silu"), Gate("gelu_tanh"), Gate("clamped_swiglu", alternating=True))
    for name, gate, bias, rows in itertools.product(grouped_cases.FORMATS, gates, (False, True), (1, 20, 70)):
        case = grouped_cases.Case(name, counts=(rows, 0, 1, 17), gate=gate, bias=bias, device=device)
        yield case, partial(grouped_cases.relative_error, case, seed=rows)


def stored(device: str) -> Iterator[tuple[object, Callable[[], float]]]:
    for keys, values, head_dim in itertools.product(paged_cases.KINDS, paged_cases.KINDS, paged_cases.HEAD_DIMS):
        yield (
            f"{keys}/{values} head {head_dim}",
            partial(paged_cases.store_error, keys, values, head_dim, device),
        )


def paged(kernel: str, device: str) -> Iterator[tuple[object, Callable[[], float]]]:
    first = paged_cases.KERNELS.index(kernel) * len(paged_cases.KINDS) ** 2 * len(paged_cases.FEATURES)
    combinations = itertools.product(paged_cases.KINDS, paged_cases.KINDS, paged_cases.FEATURES)
    for turn, (keys, values, feature) in enumerate(combinations, first):
        sizes = (paged_cases.HEAD_DIMS[turn % 5], paged_cases.GROUPS[turn // 2 % 5], paged_cases.BLOCKS[turn % 3])
        case = paged_cases.Case(keys, values, *sizes, device=device, **paged_cases.FEATURES[feature])
        yield case, partial(paged_cases.check, case, kernel, seed=turn)
