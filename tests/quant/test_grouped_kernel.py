"""Grouped products with packed matrices (`quant/kernels/product.py`) agree with float64 over the same codes: every
format, gate and bias.
"""

import os
from itertools import product

import pytest
import torch

from moedge.quant.formats.format import FORMATS, ROWS, TILES, get_format
from moedge.quant.kernels import tuning
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import GroupedProduct
from moedge.quant.tensor import pack
from support.kernels import grouped_cases as cases
from support.kernels.grouped_cases import Case, Product
from support.kernels.product_launches import warm_up_launches
from support.kernels.relayout import relayout

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"
DEVICE = "cpu" if INTERPRETED else "cuda"
GATES = {
    "none": None,
    "silu": Gate("silu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "clamped_swiglu": Gate("clamped_swiglu", alternating=True),
}


# The fast lane meets every format and every gate, with a bias and without.
CASES = [
    pytest.param(name, gate, bias, marks=[] if (at - row) % 4 == bias else pytest.mark.slow)
    for (row, name), (at, gate), bias in product(enumerate(cases.FORMATS), enumerate(GATES), [False, True])
]


@pytest.mark.parametrize(("format_name", "gate", "bias"), CASES)
def test_products_agree_with_float64(format_name: str, gate: str, bias: bool) -> None:
    assert cases.relative_error(Case(format_name, gate=GATES[gate], bias=bias, device=DEVICE)) < 2e-6


# Every layout, and every type of scales, with zero points and without.
@pytest.mark.sample("int4-g64-f16-zp", "int8-g128-bf16", "mxfp4-e8m0", "nf4-f32", "q4_k")
@pytest.mark.parametrize(
    "format_name", [each for each in sorted({*FORMATS} - {*cases.FORMATS}) if get_format(each).codes in tuning._TILES]
)
def test_products_with_formats_of_checkpoints_agree_with_float64(format_name: str) -> None:
    case = Case(format_name, 40, 256, (1, 20), num_tokens=None, bias=True, device=DEVICE)
    assert cases.relative_error(case) < 2e-6


@pytest.mark.parametrize("counts", [(1,), (40, 0, 0, 1), (100,)])
@pytest.mark.parametrize("format_name", cases.FORMATS)
def test_ragged_groups_in_every_tile_height(format_name: str, counts: tuple[int, ...]) -> None:
    case = Case(format_name, 40, 64, counts, num_tokens=None, dtype=torch.bfloat16, device=DEVICE)
    # The interpreter computes in float32; what is left is the result's cut to 8 bits, which it does not round.
    assert cases.relative_error(case) < (5e-3 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_columns_need_not_fill_the_last_step(format_name: str) -> None:
    assert cases.relative_error(Case(format_name, 50, 80, device=DEVICE)) < 2e-6


# SmolLM2's keys, rows that no tile ends at, and columns of gpt-oss.
@pytest.mark.sample(10)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(192, 576), (104, 256), (136, 2880)])
@pytest.mark.parametrize("format_name", cases.FORMATS)
def test_a_matrix_that_leaves_processors_idle_has_more_programs_and_the_same_bits(
    format_name: str, num_rows: int, num_columns: int
) -> None:
    case = Case(format_name, num_rows, num_columns, (5,), None, dtype=torch.bfloat16, device=DEVICE)
    made, product = Product.make(case), GroupedProduct(DEVICE)
    found, programs = [], []
    for product.processors in (0, 132):
        launch = product.multiply(made.x, made.matrices[0], made.out.fill_(float("nan")))
        launch.run()
        found.append(made.out.clone())
        programs.append(launch.grid[1])
        kernels = [each.arguments[-1] for each in product.warm_up_launches(made.matrices[0].layout, torch.bfloat16)]
        # Which is no other one in a job.
        assert {product.multiply(made.x[:1].expand(rows, -1), made.matrices[0], made.out).arguments[-1]
                for rows in (1, 16, 17, 64, 512)} == {*kernels}  # fmt: skip
    assert programs[0] < programs[1]
    assert torch.equal(*found)
    wanted = made.reference()
    assert (found[1].cpu().double() - wanted).norm() / wanted.norm() < (5e-3 if INTERPRETED else 1e-2)


def test_another_matrix_is_noticed() -> None:
    product = Product.make(Case("nf4", device=DEVICE))
    product.matrices[1], product.matrices[2] = product.matrices[2], product.matrices[1]
    reference = product.reference()
    product.matrices[1], product.matrices[2] = product.matrices[2], product.matrices[1]
    product.launch().run()
    assert (product.out.cpu() - reference).norm() / reference.norm() > 0.1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("format_name", cases.FORMATS)
def test_a_warm_up_launches_every_tile_height_and_reads_no_matrix(format_name: str, deterministic: bool) -> None:
    """Far more is read than the few bytes that stand in for matrices, if anything is: the process would end."""
    layout = get_format(format_name).layout((8192, 1 << 16), "bfloat16")
    product = GroupedProduct(DEVICE, deterministic)
    launches = warm_up_launches(product, layout, torch.bfloat16, bias=True, gate=GATES["silu"], gathers=True)
    assert [launch.arguments[-1].rows for launch in launches] == ([16] if deterministic else [16, 32, 64])
    for launch in launches:
        # One program of each run of outputs is the same as all of them.
        launch._replace(grid=(1, 2)).run()


def test_tensors_that_are_not_aligned_are_refused() -> None:
    product = Product.make(Case("none", 40, 64, device=DEVICE))
    product.biases = [torch.zeros(41, device=DEVICE)[1:] for _ in product.spans]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        product.launch()


def test_codes_in_the_order_of_a_cpu_kernel_are_not_taken() -> None:
    packed = pack(torch.randn(64, 64), "int4", TILES)
    assert [GroupedProduct(DEVICE).takes(each.layout) for each in (packed, relayout(packed, ROWS))] == [False, True]


def test_rows_that_leave_biases_unaligned_are_not_taken() -> None:
    matrices = [Product.make(Case("none", num_rows, 64)).matrices for num_rows in (40, 42)]
    assert [GroupedProduct(DEVICE).takes(*(one.layout for one in each)) for each in matrices] == [True, False]
