"""The frame of quantized keys (`quant/kv/codec.py`): orthonormal for every head size, and invisible to attention."""

import pytest
import torch

from moedge.quant.kv.codec import KeyTransform, decode, encode, rotation
from moedge.quant.kv.format import VECTOR_FORMATS

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("dim", [1, 2, 6, 64, 80, 96, 112, 128, 192, 256])
def test_rotations_are_orthonormal_and_spread_every_element(dim: int) -> None:
    matrix = rotation(dim).double()
    assert (matrix @ matrix.T - torch.eye(dim)).abs().max() < 1e-6
    # No element keeps more than twice (cosines: sqrt 2 each way) its fair share of any one it is spread over.
    assert matrix.abs().max() <= 2**0.5 * dim**-0.5 + 1e-6


@pytest.mark.parametrize("tiled", [False, True])
def test_frames_do_not_change_attention(tiled: bool) -> None:
    torch.manual_seed(0)
    q, k, offsets = torch.randn(5, 4, 96), torch.randn(300, 2, 96), torch.randn(1, 2, 96)
    frame = KeyTransform(offsets, tiled)
    stored, turned, shifts = frame.keys(0, k), frame.queries(q), frame.shifts(0, q)
    for head in range(4):
        exact = q[:, head].double() @ k[:, head // 2].double().T
        framed = turned[:, head].double() @ stored[:, head // 2].double().T
        assert (framed + shifts[:, head : head + 1] - exact).abs().max() < 1e-4
        assert (framed.softmax(-1) - exact.softmax(-1)).abs().max() < 1e-4


def test_tiled_rotations_do_not_depend_on_how_many_rows_there_are() -> None:
    frame, x = KeyTransform(torch.zeros(1, 3, 128), tiled=True), torch.randn(700, 3, 128)
    whole = frame.keys(0, x)
    assert all(torch.equal(frame.keys(0, x[i : i + n]), whole[i : i + n]) for i, n in ((0, 1), (5, 90), (131, 569)))


def test_offsets_and_rotation_lower_the_error_of_int4() -> None:
    """Keys as Qwen2's: a large constant bias; and with a few channels that are always large."""
    torch.manual_seed(1)
    plain = torch.randn(500, 1, 128)
    biased = plain + 50 * torch.randn(1, 128)
    outliers = plain.clone()
    outliers[..., [3, 40, 77]] *= 12
    int4 = VECTOR_FORMATS["int4"]

    def error(x: torch.Tensor, frame: KeyTransform | None) -> float:
        framed = x if frame is None else frame.keys(0, x)
        return float((decode(encode(framed, int4), int4, torch.float32) - framed).norm() / plain.norm())

    nothing = KeyTransform(torch.zeros(1, 1, 128))
    assert error(biased, KeyTransform(biased.mean(0)[None])) < 0.1 * error(biased, nothing)
    assert error(outliers, nothing) < 0.6 * error(outliers, None)
