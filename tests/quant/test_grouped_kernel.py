"""Grouped products with packed matrices agree with float64 over the same codes: every format, gate and bias."""

import os

import grouped_cases as cases
import pytest
import torch
from grouped_cases import Case, Product

from moedge.quant.kernels.operands import Gate

INTERPRETED = os.environ["TRITON_INTERPRET"] != "0"
DEVICE = "cpu" if INTERPRETED else "cuda"
GATES = {
    "none": None,
    "silu": Gate("silu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "clamped_swiglu": Gate("clamped_swiglu", alternating=True),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("format_name", cases.FORMATS)
def test_products_agree_with_float64(format_name: str, gate: str, bias: bool) -> None:
    assert cases.relative_error(Case(format_name, gate=GATES[gate], bias=bias, device=DEVICE)) < 2e-6


@pytest.mark.parametrize("counts", [(1,), (40, 0, 0, 1), (100,)])
@pytest.mark.parametrize("format_name", cases.FORMATS)
def test_ragged_groups_in_every_tile_height(format_name: str, counts: tuple[int, ...]) -> None:
    case = Case(format_name, 40, 64, counts, num_tokens=None, dtype=torch.bfloat16, device=DEVICE)
    # The interpreter computes in float32; what is left is the result's cut to 8 bits, which it does not round.
    assert cases.relative_error(case) < (5e-3 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_columns_need_not_fill_the_last_step(format_name: str) -> None:
    assert cases.relative_error(Case(format_name, 50, 80, device=DEVICE)) < 2e-6


def test_another_matrix_is_noticed() -> None:
    product = Product.make(Case("nf4", device=DEVICE))
    product.matrices[1], product.matrices[2] = product.matrices[2], product.matrices[1]
    reference = product.reference()
    product.matrices[1], product.matrices[2] = product.matrices[2], product.matrices[1]
    product.launch().run()
    assert (product.out.cpu() - reference).norm() / reference.norm() > 0.1
