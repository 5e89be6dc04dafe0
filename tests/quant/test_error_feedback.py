"""`quant/error_feedback.py`: errors move later columns so that outputs are nearer, and packing makes the codes that it
counted with.

Inputs are what reaches matrices of models: a few directions have most of their energy, and some columns far more.
"""

import pytest
import torch
from torch import Tensor

from moedge.quant.error_feedback import BLOCK, DAMPING, ErrorFeedback
from moedge.quant.formats.format import FormatError, get_format
from moedge.quant.tensor import PackedTensor, pack_into

# The width of SmolLM2, that of Qwen3-30B-A3B's experts, and one with half a block that can move; and which part of the
# error is left at the most.
WIDTHS = {576: 0.7, 768: 0.7, 96: 0.9}


def inputs(columns: int, rows: int = 2048) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    few = torch.randn(rows, columns // 8, generator=generator) @ torch.randn(columns // 8, columns, generator=generator)
    found = few / (columns // 8) ** 0.5 + 0.3 * torch.randn(rows, columns, generator=generator)
    found[:, :: columns // 5] *= 20
    return found


def weights(columns: int, rows: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).mul(0.02).bfloat16()


def packed(weight: Tensor, form: str, importance: Tensor | None = None) -> PackedTensor:
    layout = get_format(form).layout((weight.shape[0], weight.shape[1]), "bfloat16")
    return pack_into(weight, layout, torch.empty(layout.nbytes, dtype=torch.uint8), importance=importance)


def lost(weight: Tensor, made: PackedTensor, x: Tensor) -> float:
    """The error of outputs, relative."""
    wanted = x @ weight.float().T
    return float((x @ made.dequantize().float().T - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("form", "columns"), [*(("int3", each) for each in WIDTHS), ("vq2", 576), ("vq2", 768)])
def test_outputs_are_nearer_than_where_each_column_keeps_its_error(form: str, columns: int) -> None:
    """Of inputs that nothing was measured of, too."""
    x, weight = inputs(columns), weights(columns)
    measured, others = x[:1536], x[1536:]
    moments = measured.T @ measured / len(measured)
    feedback = ErrorFeedback.of(moments)
    moved = feedback.moved(weight, packed(weight, form).layout)
    fed_back = lost(weight, packed(moved, form, feedback.importance), others)
    plain = lost(weight, packed(weight, form, moments.diagonal().contiguous()), others)
    assert fed_back < WIDTHS[columns] * plain


def test_packing_makes_the_codes_from_whose_errors_columns_moved() -> None:
    """The definition in float64: a block at a time, all columns behind it by regression on its error."""
    x, weight = inputs(192), weights(192)
    moments = (x.T @ x / len(x)).double()
    feedback = ErrorFeedback.of(moments.float())
    moved = feedback.moved(weight, packed(weight, "int3").layout)
    found = packed(moved, "int3", feedback.importance).dequantize().double()
    damped = moments + torch.eye(192) * DAMPING * moments.diagonal().mean()
    wanted = weight.double()
    for begin in range(0, 192, BLOCK):
        end = begin + BLOCK
        error = wanted[:, begin:end] - found[:, begin:end]
        behind = torch.linalg.solve(damped[end:, end:], damped[end:, begin:end])
        wanted[:, end:] += error @ behind.T
        # A weight between two numbers of bfloat16 may go to either.
        torch.testing.assert_close(moved[:, begin:end].double(), wanted[:, begin:end], rtol=2**-7, atol=1e-5)


def test_importance_is_what_is_left_when_the_columns_behind_have_moved() -> None:
    x = inputs(128)
    moments = (x.T @ x / len(x)).double()
    damped = moments + torch.eye(128) * DAMPING * moments.diagonal().mean()
    first, rest = slice(0, BLOCK), slice(BLOCK, None)
    left = damped[first, first] - damped[first, rest] @ torch.linalg.solve(damped[rest, rest], damped[rest, first])
    found = ErrorFeedback.of(moments.float()).importance
    torch.testing.assert_close(found[first], left.diagonal().float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(found[rest], damped[rest, rest].diagonal().float(), rtol=1e-3, atol=0)


def test_inputs_that_are_not_correlated_move_nothing() -> None:
    weight = weights(192)
    feedback = ErrorFeedback.of(torch.eye(192) * 3)
    assert torch.equal(feedback.moved(weight, packed(weight, "int3").layout), weight)
    silent = ErrorFeedback.of(torch.zeros(192, 192))
    assert torch.equal(silent.moved(weight, packed(weight, "int3").layout), weight)


def test_weights_that_are_not_finite_are_left_to_packing_which_says_so() -> None:
    weight = weights(192)
    weight[3, 5] = torch.nan
    x = inputs(192)
    feedback = ErrorFeedback.of(x.T @ x)
    layout = packed(weights(192), "int3").layout
    with pytest.raises(FormatError, match=r"1 NaN or infinite weights .* \[128, 192\]"):
        pack_into(
            feedback.moved(weight, layout), layout, torch.empty(layout.nbytes, dtype=torch.uint8),
            importance=feedback.importance,
        )  # fmt: skip
