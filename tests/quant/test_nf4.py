import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant import tensor
from moedge.quant.formats import bitsandbytes_kernels, nf4
from moedge.quant.formats.format import FormatError
from moedge.quant.tensor import PackedTensor, pack

bitsandbytes_kernels.load()
from bitsandbytes import functional  # noqa: E402

pytestmark = pytest.mark.numerics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_LEVELS_AND_MIDPOINTS = sorted([*nf4.LEVELS, *nf4.MIDPOINTS])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Finite weights of any bits whatever: subnormal, -0, huge, and blocks of zeros."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 3)), 64 * draw(st.integers(1, 3))
    count = shape[0] * shape[1]
    bits = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    weight = torch.frombuffer(bytearray(bits), dtype=dtype).reshape(shape)
    return torch.where(weight.isfinite(), weight, 0)


def assert_codes_are_those_of_bitsandbytes(weight: Tensor) -> None:
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = pack(weight, "nf4")
    assert torch.equal(packed.planes[0].flatten(), codes.flatten())
    largest = nf4.LARGEST_ABSMAX[weight.dtype]
    assert torch.equal(packed.planes[1].flatten(), state.absmax.clamp(max=largest).bfloat16())


@given(matrices())
@settings(max_examples=200, deadline=None)
def test_codes_of_any_finite_weights_are_those_of_bitsandbytes(weight: Tensor) -> None:
    assert_codes_are_those_of_bitsandbytes(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_codes_of_gaussian_weights_are_those_of_bitsandbytes(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(7)
    assert_codes_are_those_of_bitsandbytes((torch.randn(777, 512, generator=generator) * scale).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absmax", [1.0, 0.5, 2.0**-120, 3.0, 0.1, 1.1754944e-38, 1e-38, 1e-45, 3.4e38])
def test_codes_at_and_beside_every_threshold_are_those_of_bitsandbytes(dtype: torch.dtype, absmax: float) -> None:
    points = torch.tensor(ALL_LEVELS_AND_MIDPOINTS).mul(absmax).to(dtype)
    points = torch.where(points.isfinite(), points, 0)
    up, down = torch.tensor(torch.inf, dtype=dtype), torch.tensor(-torch.inf, dtype=dtype)
    values = torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])
    values = torch.where(values.isfinite() & (values.float().abs() <= absmax), values, 0)
    row = torch.zeros(128, dtype=dtype)
    row[: len(values)] = values
    # The largest weight stands in both blocks, so that both have the same thresholds.
    row[-1] = row[63] = points.abs().max()
    assert_codes_are_those_of_bitsandbytes(row[None])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_back_as_zeros(zero: float) -> None:
    weight = torch.full((2, 128), zero)
    assert_codes_are_those_of_bitsandbytes(weight)
    assert not pack(weight, "nf4").dequantize().any()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "PACK_CHUNK", 7 * 192)
    assert_codes_are_those_of_bitsandbytes(torch.randn(100, 192, generator=torch.Generator().manual_seed(1)))


def test_weights_need_not_be_contiguous() -> None:
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).t()
    assert torch.equal(pack(weight, "nf4").planes[0], pack(weight.contiguous(), "nf4").planes[0])


@given(matrices(), st.sampled_from(DTYPES))
@settings(max_examples=50, deadline=None)
def test_dequantizing_is_that_of_bitsandbytes_with_the_rounded_absmax(weight: Tensor, dtype: torch.dtype) -> None:
    packed = pack(weight, "nf4")
    codes, absmax = packed.planes
    expected = torch.ops.bitsandbytes.dequantize_4bit(codes, absmax.float(), 64, "nf4", weight.shape, dtype)
    ours = packed.dequantize(torch.empty_like(expected))
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@given(matrices())
@settings(max_examples=100, deadline=None)
def test_a_weight_is_off_by_at_most_half_the_widest_gap_between_levels(weight: Tensor) -> None:
    blocks = weight.double().view(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    half_gap = (nf4.LEVELS[1] - nf4.LEVELS[0]) / 2
    # 2^-8 of absmax covers its rounding to bfloat16 and its clamp; 2^-133 is the smallest bfloat16.
    bound = absmax * (half_gap + 2**-8 + 1e-6) + 2.0**-133
    back = pack(weight, "nf4").dequantize(torch.empty(weight.shape)).double().view(-1, 64)
    assert ((back - blocks).abs() <= bound).all()


def test_absmax_of_a_bfloat16_matrix_is_exact() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    absmax = pack(weight, "nf4").planes[1]
    assert torch.equal(absmax, weight.view(64, 4, 64).abs().amax(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype_come_back_finite(dtype: torch.dtype) -> None:
    weight = torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype)
    assert pack(weight, "nf4").dequantize().isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_and_counted(bad: float) -> None:
    weight = torch.zeros(4, 64)
    weight[1, 3] = weight[2, 7] = weight[2, 8] = bad
    with pytest.raises(FormatError, match=r"^3 NaN or infinite weights.*\[4, 64\]"):
        pack(weight, "nf4")


def test_levels_are_those_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(nf4.LEVELS), functional.get_4bit_type("nf4", device="cpu"))


def test_packing_what_was_dequantized_gives_the_same_codes() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(5))
    packed: PackedTensor = pack(weight, "nf4")
    assert torch.equal(pack(packed.dequantize(), "nf4").planes[0], packed.planes[0])
