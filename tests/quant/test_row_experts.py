"""Experts in order `rows` on a processor (`quant/matmul/rows.py`): every format, dtype and instruction set against what
the formats' own words say in float64.
"""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from moedge.quant.formats.format import FORMATS, ROWS, get_format
from moedge.quant.kernels.operands import ACTIVATIONS, Gate
from moedge.quant.matmul import rows
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.matmul.tiled import ExpertRows
from moedge.quant.native import library
from moedge.quant.tensor import PackedTensor, pack
from support.kernels.relayout import from_planes
from support.random_planes import defined, random_planes

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here"),
]
# Columns of DeepSeek-V2-Lite and of granite-3.0-1b-a400m; the first are no blocks of 64 in groups of 32 by 16 lanes.
HIDDEN, INNER = 1408, 512
# Every block of rows that kernels are made for, sums of two, and more than one job has.
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 33)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAMES = sorted(name for name, each in FORMATS.items() if each.codes not in ("none", "int3", "vq2") and not each.block)


@pytest.fixture(params=["avx2", "avx512", "avx512bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    found = library.loaded()
    assert found.library is not None
    if library.choose(found.library, request.param) != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.choose(found.library, found.isa)


def matrix(name: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> tuple[PackedTensor, Tensor]:
    """A random matrix, and the numbers that it stands for in float64."""
    chosen = get_format(name)
    if chosen.codes == "none":
        packed = pack(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 32, name, ROWS)
        return packed, packed.planes[0].double()
    planes = random_planes(chosen, shape, seed)
    return from_planes(name, planes, str(dtype).removeprefix("torch."), ROWS), defined(chosen, planes).double()


def oracle(x: Tensor, up: Tensor, down: Tensor, gate: Gate, biases: tuple[Tensor, Tensor]) -> Tensor:
    both = x @ up.t() + biases[0].double()
    halves = (both[:, ::2], both[:, 1::2]) if gate.alternating else both.chunk(2, 1)
    gates, ups = halves
    if gate.activation == "silu":
        inner = torch.nn.functional.silu(gates) * ups
    elif gate.activation == "gelu_tanh":
        inner = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    else:
        gates, ups = gates.clamp(max=7), ups.clamp(-7, 7)
        inner = gates * torch.sigmoid(1.702 * gates) * (ups + 1)
    return inner @ down.t() + biases[1].double()


def error(name: str, dtype: torch.dtype, gate: Gate, hidden: int = HIDDEN, inner: int = INNER) -> float:
    """The worst relative error of an expert's rows."""
    generator = torch.Generator().manual_seed(1)
    states = (torch.randn(11, hidden, generator=generator) / 32).to(dtype)
    token_ids = torch.randint(0, 11, (sum(COUNTS),), generator=generator)
    out = torch.full((sum(COUNTS), hidden), float("nan"), dtype=dtype)
    experts, wanted = [], []
    for first, count in zip(accumulate(COUNTS, initial=0), COUNTS, strict=False):
        (up, exact_up), (down, exact_down) = (
            matrix(name, shape, dtype, seed) for seed, shape in enumerate(((2 * inner, hidden), (hidden, inner)), first)
        )
        biases = tuple(torch.randn(size, generator=generator).to(dtype) for size in (2 * inner, hidden))
        experts.append(ExpertRows(first, count, up, biases[0], down, biases[1]))
        x = states[token_ids[first : first + count]].double()
        wanted.append(oracle(x, exact_up, exact_down, gate, biases))
    layouts = experts[0].up.layout, experts[0].down.layout
    assert rows.takes(*layouts, gate)
    scratch = torch.full((sum(COUNTS) * rows.scratch_numbers(*layouts),), float("nan"))
    pool = WorkerPool(2)
    rows.multiply_experts(states, token_ids, experts, gate, out, scratch, pool.call_on_all)
    return max(
        float((out[one.first : one.first + one.num_rows].double() - exact).norm() / exact.norm())
        for one, exact in zip(experts, wanted, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [*NAMES, "none"])
def test_every_format_gives_what_its_words_say(name: str, dtype: torch.dtype, isa: str) -> None:
    assert error(name, dtype, Gate("silu")) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp4", "int8", "int4-g64-f16-zp", "none"])
def test_formats_that_run_most(name: str) -> None:
    assert error(name, torch.bfloat16, Gate("silu"), inner=192) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("gate", [Gate(name, alternating) for name in ACTIVATIONS for alternating in (False, True)])
def test_every_gate(gate: Gate) -> None:
    assert error("int4", torch.float32, gate, inner=96) < TOLERANCE[torch.float32]


def test_columns_that_are_no_blocks_of_64() -> None:
    assert error("mxfp4", torch.bfloat16, Gate("silu"), hidden=2880 - 32, inner=96) < TOLERANCE[torch.bfloat16]


def test_bits_of_a_row_depend_on_neither_threads_nor_other_rows() -> None:
    (up, _), (down, _) = (matrix("int4", shape, torch.bfloat16, 3) for shape in ((2 * 96, 704), (704, 96)))
    states = torch.randn(8, 704, generator=torch.Generator().manual_seed(2)).bfloat16()
    scratch = torch.empty(8 * rows.scratch_numbers(up.layout, down.layout))

    def computed(count: int, threads: int) -> Tensor:
        out = torch.empty(count, 704, dtype=torch.bfloat16)
        one = ExpertRows(0, count, up, None, down, None)
        call = WorkerPool(threads).call_on_all
        rows.multiply_experts(states, torch.arange(count), [one], Gate("silu"), out, scratch, call)
        return out

    whole = computed(8, 1)
    for count, threads in ((8, 3), (1, 1), (2, 2), (3, 1), (4, 1), (6, 2)):
        assert torch.equal(computed(count, threads), whole[:count])


@pytest.mark.parametrize(
    ("name", "order", "shapes"),
    [
        ("int3", ROWS, ((192, 704), (704, 96))),
        ("q4_k", ROWS, ((512, 768), (768, 256))),
        ("int8", ROWS, ((96, 40), (40, 48))),
        ("int8", ROWS, ((96, 704), (704, 96))),
    ],
)
def test_what_the_kernel_cannot_read_is_not_taken(name: str, order: str, shapes: tuple[tuple[int, int], ...]) -> None:
    """Three bits, scales of two levels, columns that are no chunks, and matrices that do not fit each other."""
    up, down = (get_format(name).in_order(order).layout(shape, "bfloat16") for shape in shapes)
    assert not rows.takes(up, down, Gate("silu"))
