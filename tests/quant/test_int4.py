import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant.formats import int4
from moedge.quant.formats.format import FormatError, get_format
from moedge.quant.tensor import pack, unpack_nibbles
from support.kernels.relayout import from_planes
from support.packing_error import relative_error
from support.random_planes import random_planes

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


def steps_and_zeros(planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The step between codes, and the code of 0, of every weight [N, K], float64."""
    _, pairs, factors = planes
    scale, zero = pairs.double().repeat_interleave(32, dim=1).unbind(2)
    return scale * factors.double()[:, None], zero / 16


@pytest.mark.parametrize("num_rows", [1, 64, 100])
def test_a_weight_is_its_code_less_the_zero_times_scale_and_factor(num_rows: int) -> None:
    packed = pack(gaussian(num_rows, 64), "int4")
    step, zero = steps_and_zeros(packed.planes)
    wanted = (unpack_nibbles(packed.planes[0]).double() - zero) * step
    torch.testing.assert_close(packed.dequantize(torch.empty(num_rows, 64)).double(), wanted, rtol=1e-6, atol=1e-8)
    assert (packed.planes[1][..., 0].amax(1) == 255).all()


@needs_kernel
def test_codes_lie_as_torch_packs_them() -> None:
    numbers = torch.randint(0, 16, (128, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    codes = torch.empty(128, 48, dtype=torch.uint8)
    int4.interleave(numbers, codes)
    assert torch.equal(codes_by_row(codes), numbers)
    assert torch.equal(torch._convert_weight_to_int4pack_for_cpu(numbers, 1), codes)


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_the_kernel_multiplies_by_the_same_matrix(num_rows: int) -> None:
    chosen = get_format("int4-g32-bf16-zp")
    packed = from_planes(chosen.name, random_planes(chosen, (100, 192)), "bfloat16")
    x = gaussian(num_rows, 192, seed=4)
    exact = x.double() @ packed.dequantize(torch.empty(100, 192)).double().t()
    product = int4.multiply(x, packed.planes)
    assert product.shape == (num_rows, 128)
    assert (product[:, :100].double() - exact).norm() / exact.norm() < 5e-3
    assert not product[:, 100:].any(), "rows that pad a block are zeros"


# What moves all weights of a matrix to one side of 0, or away from it.
SHIFTS = st.sampled_from([0.0, 1.0, -1.0, 100.0, -100.0])


@given(st.integers(1, 70), st.integers(1, 4), st.floats(-90, 90), SHIFTS, st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_no_weight_is_off_by_more_than_half_a_step(
    num_rows: int, groups: int, exponent: float, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Groups of a row differ in width, up to 2^24 times.
    widths = 2.0 ** -torch.randint(0, 25, (num_rows, groups), generator=generator).float().repeat_interleave(32, 1)
    weight = (torch.randn(num_rows, 32 * groups, generator=generator) + shift) * widths * 2.0**exponent
    packed = pack(weight, "int4")
    error = (packed.dequantize(torch.empty(weight.shape)).double() - weight.double()).abs()
    step, _ = steps_and_zeros(packed.planes)
    assert (error <= 0.5 * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 3e38, -3e38, 1e-30])
def test_groups_of_equal_weights_are_exact(value: float) -> None:
    weight = torch.full((3, 64), value).bfloat16()
    assert torch.equal(pack(weight, "int4").dequantize(), weight)


@pytest.mark.parametrize("value", [1e-39, -1e-39, 1e-45])
def test_subnormal_weights_are_off_by_the_smallest_step_at_most(value: float) -> None:
    weight = torch.full((3, 64), value)
    found = pack(weight, "int4").dequantize()
    assert (found - weight).abs().max() <= int4.SMALLEST_FACTOR / 2


def test_a_row_takes_no_factor_of_another() -> None:
    weight = gaussian(3, 128) * torch.tensor([1.0, 2.0**60, 2.0**-60]).bfloat16()[:, None]
    whole = pack(weight, "int4").dequantize()
    assert torch.equal(torch.cat([pack(row[None], "int4").dequantize() for row in weight]), whole)


def test_extreme_weights_stay_finite() -> None:
    """Up to nine tenths of the largest number, on processors too that round a product before they add to it."""
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([largest, -largest] * 32).view(1, 64)
    assert pack(weight * 0.9, "int4").dequantize().isfinite().all()


def test_the_error_is_the_one_in_the_docs() -> None:
    weight = gaussian(256, 2048)
    assert relative_error(weight, pack(weight, "int4")) == pytest.approx(0.0787, abs=5e-4)


def test_columns_that_groups_would_cross_are_refused() -> None:
    with pytest.raises(FormatError, match="multiples of 32"):
        get_format("int4").layout((64, 48), "bfloat16")
