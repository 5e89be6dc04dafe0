"""`quant/formats/vq2.py`: what codes mean, that no other point is nearer and no other scale much better, and weights at
the ends of their dtype."""

import pytest
import torch
from torch import Tensor

from moedge.quant.formats import vq2
from moedge.quant.formats.format import get_format
from moedge.quant.tensor import PackedTensor, pack, pack_into
from support.packing_error import relative_error
from support.random_planes import vq2_values

pytestmark = pytest.mark.numerics


def gaussian(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: Tensor, importance: Tensor | None = None) -> PackedTensor:
    layout = get_format("vq2").layout((weight.shape[0], weight.shape[1]), "bfloat16")
    return pack_into(weight, layout, torch.empty(layout.nbytes, dtype=torch.uint8), importance=importance)


def points() -> Tensor:
    """All that a pair may be, float64 [32, 2]: those of codes 0 to 15 and their opposites."""
    some = torch.tensor([[code & 15, code >> 4] for code in vq2.POINTS]).double() - 7.5
    return torch.cat([some, -some])


# Chunks of 128 and of 64 columns (gpt-oss: 2880).
@pytest.mark.parametrize("num_columns", [256, 192])
def test_codes_mean_what_the_format_says(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (5, num_columns // 16 * 5), generator=generator, dtype=torch.uint8)
    scales = torch.ones(5, num_columns // 64, dtype=torch.bfloat16)
    out = torch.empty(5, num_columns)
    vq2.unpack((codes, scales), out, out)
    assert torch.equal(out.double(), vq2_values(codes))
    assert torch.equal(vq2.join_rows(vq2.split_rows(codes)), codes)


def test_points_are_32() -> None:
    assert len({tuple(each) for each in points().tolist()}) == 32


def losses(weight: Tensor, importance: Tensor, scales: Tensor) -> Tensor:
    """What the nearest points lose of groups [n, 64] with these scales [n, 1], as packing counts: float64 [n]."""
    groups = weight.double()
    counts = (groups.square() + groups.square().mean(1, keepdim=True)).sqrt() * importance.double()
    pairs, counts = (each.view(-1, 8, 2, 4).transpose(2, 3).reshape(-1, 32, 1, 2) for each in (groups, counts))
    apart = pairs - points() * scales.double()[:, None, None]
    return (counts * apart.square()).sum(3).amin(2).sum(1)


def test_points_are_the_nearest_and_scales_among_the_best() -> None:
    weight = gaussian(128, 64, 2)
    importance = torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.1
    found = packed(weight, importance)
    scales = found.planes[1]
    apart = found.dequantize().double() - weight.double()
    counts = (weight.double().square() + weight.double().square().mean(1, keepdim=True)).sqrt() * importance
    lost = losses(weight, importance, scales)
    # Dequantized weights are rounded to bfloat16.
    assert torch.allclose((counts * apart.square()).sum(1), lost, rtol=0.02)
    root = weight.double().square().mean(1, keepdim=True).sqrt()
    least = torch.stack([losses(weight, importance, root * (0.2 + each / 200)) for each in range(60)]).amin(0)
    assert float(lost.sum() / least.sum()) < 1.04


def test_errors_are_less_than_those_of_six_levels() -> None:
    """The best six levels of a normal weight lose 0.058 of its squares (Max, 1960), and take 2.58 bits."""
    weight = gaussian(256, 768)
    error = relative_error(weight, pack(weight, "vq2"))
    assert error == pytest.approx(0.2362, abs=2e-3)
    assert error**2 < 0.058


@pytest.mark.parametrize("largest", [1e-40, 1e-25, 3e38])
def test_groups_of_zeros_and_weights_at_the_ends_of_their_dtype_stay_finite(largest: float) -> None:
    weight = (gaussian(8, 128) / 4).clamp(-1, 1).float().mul(largest).bfloat16()
    weight[3, :64] = 0
    back = pack(weight, "vq2").dequantize()
    assert back.isfinite().all()
    assert not back[3, :64].any()
    if largest > 1e-30:
        assert relative_error((weight / largest).bfloat16(), pack((weight / largest).bfloat16(), "vq2")) < 0.3


def test_errors_count_by_the_importance_of_their_column() -> None:
    """Where one column in eight counts a hundred times; a factor of all columns changes nothing."""
    weight = gaussian(256, 768)
    importance = torch.where(torch.arange(768) % 8 == 3, 100.0, 1.0)
    plain, weighted = packed(weight), packed(weight, importance)
    lost = [float(((each.dequantize() - weight).float().square() * importance).sum()) for each in (plain, weighted)]
    assert lost[1] < 0.6 * lost[0]
    assert torch.equal(packed(weight, 4 * importance).dequantize(), weighted.dequantize())
