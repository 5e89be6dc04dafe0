import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant.formats import int4
from moedge.quant.formats.format import FormatError, get_format
from moedge.quant.tensor import pack
from support.packing_error import relative_error

pytestmark = pytest.mark.numerics

needs_kernel = pytest.mark.skipif(
    not int4.has_kernel(), reason="torch's kernel orders codes otherwise on this processor"
)


def gaussian(num_rows: int, num_columns: int, seed: int = 3) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


def codes_by_row(codes: Tensor) -> Tensor:
    """The inverse of the layout that the module describes, written from its words: int [N, K]."""
    num_rows, num_columns = len(codes), codes.shape[1] * 2
    lying = codes.reshape(-1).tolist()
    out = torch.zeros(num_rows, num_columns, dtype=torch.int32)
    for row in range(num_rows):
        block, inside = divmod(row, 64)
        half, byte = divmod(inside, 32)
        for column in range(num_columns):
            out[row, column] = lying[(block * num_columns + column) * 32 + byte] >> (4 * half) & 15
    return out


@pytest.mark.parametrize("num_rows", [1, 64, 100])
def test_a_weight_is_its_code_times_scale_plus_zero(num_rows: int) -> None:
    packed = pack(gaussian(num_rows, 64), "int4")
    codes, scales = packed.planes
    scale, zero = scales.double().transpose(0, 1).repeat_interleave(32, dim=1)[:num_rows].unbind(2)
    wanted = (codes_by_row(codes)[:num_rows].double() - 8) * scale + zero
    torch.testing.assert_close(packed.dequantize(torch.empty(num_rows, 64)).double(), wanted, rtol=1e-6, atol=1e-9)


@needs_kernel
def test_codes_lie_as_torch_packs_them() -> None:
    packed = pack(gaussian(128, 96), "int4")
    codes = packed.planes[0]
    assert torch.equal(torch._convert_weight_to_int4pack_for_cpu(codes_by_row(codes), 1), codes)


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_the_kernel_multiplies_by_the_same_matrix(num_rows: int) -> None:
    packed = pack(gaussian(100, 192), "int4")
    x = gaussian(num_rows, 192, seed=4)
    exact = x.double() @ packed.dequantize(torch.empty(100, 192)).double().t()
    product = int4.multiply(x, packed.planes)
    assert product.shape == (num_rows, 128)
    assert (product[:, :100].double() - exact).norm() / exact.norm() < 5e-3
    assert not product[:, 100:].any(), "rows that pad a block are zeros"


@given(st.integers(1, 70), st.integers(1, 4), st.floats(-30, 30), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_no_weight_is_off_by_more_than_half_a_step(num_rows: int, groups: int, exponent: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(num_rows, 32 * groups, generator=generator) + 1) * 2.0**exponent
    packed = pack(weight, "int4")
    scale, zero = packed.planes[1].float().transpose(0, 1).repeat_interleave(32, dim=1)[:num_rows].unbind(2)
    # Rounding scale and zero to bfloat16 moves the ends of a group beyond the outermost codes.
    rounding = 2.0**-8 * (7.5 * scale + zero.abs())
    error = (packed.dequantize(torch.empty(weight.shape)) - weight).abs()
    assert (error <= 0.5 * scale * 1.001 + rounding).all()


@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 3e38, 1e-30])
def test_groups_of_equal_weights_are_exact(value: float) -> None:
    weight = torch.full((3, 64), value).bfloat16()
    assert torch.equal(pack(weight, "int4").dequantize(), weight)


def test_extreme_weights_stay_finite() -> None:
    """Up to nine tenths of the largest number, on processors too that round a product before they add to it."""
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([largest, -largest] * 32).view(1, 64)
    assert pack(weight * 0.9, "int4").dequantize().isfinite().all()


def test_the_error_is_the_one_in_the_docs() -> None:
    weight = gaussian(256, 2048)
    assert relative_error(weight, pack(weight, "int4")) == pytest.approx(0.0783, abs=5e-4)


def test_columns_that_groups_would_cross_are_refused() -> None:
    with pytest.raises(FormatError, match="multiples of 32"):
        get_format("int4").layout((64, 48), "bfloat16")
