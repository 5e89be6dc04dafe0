import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant import tensor
from moedge.quant.formats import int8
from moedge.quant.formats.format import FormatError
from moedge.quant.tensor import pack

pytestmark = pytest.mark.numerics

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Finite weights of any bits whatever."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    count = shape[0] * shape[1]
    bits = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    weight = torch.frombuffer(bytearray(bits), dtype=dtype).reshape(shape)
    return torch.where(weight.isfinite(), weight, 0)


@given(matrices())
@settings(max_examples=200, deadline=None)
def test_a_weight_is_off_by_at_most_half_its_row_scale(weight: Tensor) -> None:
    packed = pack(weight, "int8")
    codes, scales = packed.planes
    back = codes.double() * scales.double()[:, None]
    assert ((back - weight.double()).abs() <= scales.double()[:, None] * (0.5 + 1e-4)).all()
    assert codes.min() >= -127


@given(matrices())
@settings(max_examples=50, deadline=None)
def test_dequantizing_rounds_codes_times_scales_once(weight: Tensor) -> None:
    packed = pack(weight, "int8")
    codes, scales = packed.planes
    assert torch.equal(packed.dequantize(), (codes.float() * scales[:, None]).to(weight.dtype))


@given(matrices())
@settings(max_examples=50, deadline=None)
def test_the_largest_weight_of_a_row_has_the_largest_code(weight: Tensor) -> None:
    codes, _ = pack(weight, "int8").planes
    # Rows below the smallest absmax have no code but 0.
    rows = weight.float().abs().amax(1) >= int8.SMALLEST_ABSMAX
    assert (codes.int().abs().amax(1)[rows] == 127).all()


def test_rows_have_their_own_scales() -> None:
    weight = torch.tensor([[1.0, -0.5], [1000.0, 250.0]])
    assert torch.allclose(pack(weight, "int8").dequantize(), weight, rtol=0.01)


def test_zeros_come_back_as_zeros() -> None:
    assert not pack(torch.zeros(3, 5), "int8").dequantize().any()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 33, generator=torch.Generator().manual_seed(1))
    whole = pack(weight, "int8")
    monkeypatch.setattr(tensor, "PACK_CHUNK", 7 * 33)
    chunked = pack(weight, "int8")
    assert all(torch.equal(one, other) for one, other in zip(whole.planes, chunked.planes, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format_name", ["int8", "none"])
def test_weights_that_are_not_finite_are_refused_and_counted(bad: float, format_name: str) -> None:
    weight = torch.zeros(4, 33, dtype=torch.bfloat16)
    weight[1, 3] = weight[2, 7] = bad
    with pytest.raises(FormatError, match=r"^2 NaN or infinite weights.*\[4, 33\]"):
        pack(weight, format_name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_rounded_to_nearest_and_half_to_even(dtype: torch.dtype) -> None:
    halves = torch.arange(-127, 127.5, 0.5).to(dtype)
    weight = torch.cat([halves[None], torch.randn(9, len(halves)).to(dtype)])
    codes, scales = pack(weight, "int8").planes
    assert torch.equal(codes, torch.round(weight.float() / scales[:, None]).to(torch.int8))
    assert torch.equal(codes[0], torch.round(halves.float()).to(torch.int8))
