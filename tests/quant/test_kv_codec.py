"""KV codes (`quant/kv/codec.py`): how far decoding is from the vector, what is exact, and what stays not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.quant.kv.codec import Coded, decode, encode
from moedge.quant.kv.format import VECTOR_FORMATS, VectorFormat

pytestmark = pytest.mark.numerics

INT8, INT4 = VECTOR_FORMATS["int8"], VECTOR_FORMATS["int4"]
# float16 keeps 11 bits of scales and zeros.
HALF = 2.0**-11


@given(st.integers(0, 2**31), st.sampled_from([2, 16, 80, 128]), st.floats(-4, 4), st.floats(-2, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_element_is_within_half_a_step(seed: int, dim: int, spread: float, shift: float, one_sided: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, dim, generator=generator, dtype=torch.float64) * 10**spread
    x = (x.abs() if one_sided else x) + shift * 10**spread
    x = x.float()
    for vectors in (INT8, INT4):
        coded = encode(x, vectors)
        assert coded.scales is not None
        error = (decode(coded, vectors, torch.float64) - x.double()).abs().unflatten(-1, (vectors.groups, -1))
        groups = x.double().abs().unflatten(-1, (vectors.groups, -1)).amax(-1, keepdim=True)
        step = coded.scales.double().unsqueeze(-1)
        assert (error <= step / 2 + groups * HALF * 2).all()


@pytest.mark.parametrize("vectors", [INT8, INT4], ids=["int8", "int4"])
def test_decoded_vectors_are_coded_as_themselves(vectors: VectorFormat) -> None:
    once = decode(encode(torch.randn(50, 4, 64), vectors), vectors, torch.float32)
    twice = decode(encode(once, vectors), vectors, torch.float32)
    assert (once - twice).norm() < 1e-3 * once.norm()


def test_int4_bytes_hold_the_first_half_low_and_the_second_high() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    ones, zeros = torch.ones(16, 2).half(), torch.zeros(16, 2).half()
    x = decode(Coded(every_byte, ones, zeros), INT4, torch.float32)
    assert torch.equal(x[:, :16], (every_byte % 16).float())
    assert torch.equal(x[:, 16:], (every_byte // 16).float())
    full = torch.cat([torch.zeros(16, 1), torch.full((16, 1), 15.0)], 1)
    halves = x.unflatten(-1, (2, 16)).clone()
    halves[..., :2] = full.unsqueeze(1)
    again = encode(halves.flatten(-2), INT4)
    assert torch.equal(decode(again, INT4, torch.float32), halves.flatten(-2))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_constants_zeros_and_large_numbers(name: str) -> None:
    vectors = VECTOR_FORMATS[name]
    for value in (0.0, 1.0, -3.5, 1e-6, 6e4):
        x = torch.full((2, 64), value)
        error = (decode(encode(x, vectors), vectors, torch.float32) - x).abs().max()
        assert error <= abs(value) * 2**-10 + 2.0**-17


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e9])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """A diverged sequence must end as an error row, not as plausible text; its neighbours are untouched."""
    vectors = VECTOR_FORMATS[name]
    x = torch.randn(2, 64)
    x[0, 3] = bad
    decoded = decode(encode(x, vectors), vectors, torch.float32)
    assert not decoded[0].isfinite().all()
    assert decoded[1].isfinite().all()
