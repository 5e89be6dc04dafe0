"""MXFP4 is that of gpt-oss and of gguf, bit for bit, and exact in bfloat16."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from moedge.quant.formats import mxfp4
from moedge.quant.formats.format import FormatError, get_format
from moedge.quant.tensor import Planes, pack, unpack_nibbles
from support.kernels.relayout import from_planes, planes_of
from support.packing_error import relative_error

pytestmark = pytest.mark.numerics

# Its packages for other things (sentencepiece, yaml) are not needed.
gguf = pytest.importorskip("gguf.quants")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def blocks_of(planes: Planes) -> np.ndarray:
    """As gguf stores them: an exponent, then 16 bytes whose low bits are the first half of a group."""
    numbers = unpack_nibbles(planes.codes).view(-1, 2, 16)
    joined = numbers[:, 0] | numbers[:, 1] << 4
    return torch.cat((planes.scales.view(-1, 1), joined), 1).numpy()


@st.composite
def any_planes(draw: st.DrawFn) -> Planes:
    rows, groups = draw(st.integers(1, 70)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    codes = torch.randint(0, 256, (rows, groups * 16), generator=generator, dtype=torch.uint8)
    least, most = draw(st.sampled_from([(0, 255), (0, 3), (110, 130), (250, 255)]))
    return Planes(codes, torch.randint(least, most, (rows, groups), generator=generator, dtype=torch.uint8))


@given(any_planes())
@settings(max_examples=40, deadline=None)
def test_dequantizing_is_that_of_transformers_and_of_gguf(planes: Planes) -> None:
    packed = from_planes("mxfp4", planes, "bfloat16")
    blocks = planes.codes.view(1, len(planes.codes), -1, 16)
    theirs = _convert_moe_packed_tensors(blocks, planes.scales[None])[0].t()
    # gguf computes in float32: 4 * 2^127 and more overflow there as here, as in bfloat16.
    with np.errstate(over="ignore"):
        of_gguf = torch.from_numpy(gguf.MXFP4.dequantize_blocks(blocks_of(planes))).view(packed.shape)
    wide = packed.dequantize(torch.empty(packed.shape))
    assert torch.equal(wide, of_gguf)
    # Every weight is exact in bfloat16.
    assert torch.equal(packed.dequantize(), wide.bfloat16())
    assert torch.equal(wide.bfloat16().float(), wide)
    # transformers' 2^-127 and 2^128 are 0 and infinite before they are multiplied.
    usual = (planes.scales > 0).repeat_interleave(32, 1)
    assert torch.equal(theirs[usual], packed.dequantize()[usual])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Finite weights of any bits whatever, of a group at least 2^-100 or 0.

    Not just below a power of two, which gguf's logarithm in float32 rounds up to.
    """
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3))
    count = shape[0] * shape[1]
    bits = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    weight = torch.frombuffer(bytearray(bits), dtype=dtype).reshape(shape)
    exact = weight.float().abs().frexp().mantissa < 1 - 2.0**-16
    return torch.where(weight.isfinite() & (weight.float().abs() > 2.0**-100) & exact, weight, 0)


@given(matrices())
@settings(max_examples=100, deadline=None)
def test_codes_of_any_weights_are_those_of_gguf(weight: Tensor) -> None:
    with np.errstate(over="ignore"):
        theirs = gguf.MXFP4.quantize_blocks(weight.float().view(-1, 32).numpy())
    assert np.array_equal(blocks_of(planes_of(pack(weight, "mxfp4"))), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_at_and_beside_every_threshold_are_those_of_gguf(dtype: torch.dtype) -> None:
    points = torch.tensor([*mxfp4.LEVELS, *mxfp4.MIDPOINTS, *(-each for each in mxfp4.MIDPOINTS)]).to(dtype)
    ends = [torch.tensor(sign * torch.inf, dtype=dtype) for sign in (1, -1)]
    values = torch.cat([points, *(torch.nextafter(points, end) for end in ends)])
    rows = torch.zeros(len(values), 32, dtype=dtype)
    rows[:, 0], rows[:, 1] = values, 4
    theirs = gguf.MXFP4.quantize_blocks(rows.float().numpy())
    assert np.array_equal(blocks_of(planes_of(pack(rows, "mxfp4"))), theirs)


def test_what_was_dequantized_packs_to_the_same_bytes() -> None:
    packed = pack(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), "mxfp4")
    again = pack(packed.dequantize(), "mxfp4")
    for one, other in zip(packed.planes, again.planes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_weights_stay_finite_and_zeros_are_zeros(dtype: torch.dtype) -> None:
    largest = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
    assert pack(largest, "mxfp4").dequantize().isfinite().all()
    smallest = torch.full((1, 32), torch.finfo(dtype).tiny * torch.finfo(dtype).eps, dtype=dtype)
    assert pack(smallest, "mxfp4").dequantize().abs().max() <= smallest[0, 0]
    assert not pack(-torch.zeros(1, 32, dtype=dtype), "mxfp4").dequantize().any()


def test_the_error_is_the_one_in_the_docs() -> None:
    weight = torch.randn(256, 2048, generator=torch.Generator().manual_seed(3)).mul(0.02).bfloat16()
    packed = pack(weight, "mxfp4")
    assert packed.nbytes * 8 / weight.numel() == 4.25
    assert relative_error(weight, packed) == pytest.approx(0.1140, abs=5e-4)


@pytest.mark.parametrize("library", [True, False])
def test_an_output_may_begin_anywhere(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(mxfp4, "widen_mxfp4", lambda *_: False)
    packed = pack(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), "mxfp4")
    out = torch.empty(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)
    assert torch.equal(packed.dequantize(out).float(), packed.dequantize())


def test_pieces_are_widened_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), "mxfp4")
    whole = packed.dequantize()
    monkeypatch.setattr(mxfp4, "widen_mxfp4", lambda *_: False)
    monkeypatch.setattr(mxfp4, "CHUNK", 130)
    assert torch.equal(packed.dequantize(), whole)


def test_a_scale_that_is_nan_is_refused() -> None:
    planes = Planes(torch.zeros(2, 32, dtype=torch.uint8), torch.full((2, 2), 255, dtype=torch.uint8))
    with pytest.raises(FormatError, match="NaN or infinite scales"):
        from_planes("mxfp4", planes, "bfloat16")
    assert get_format("mxfp4").group == mxfp4.GROUP
