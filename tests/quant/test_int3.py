"""3-bit integers: what packing keeps, what it loses, and weights at the ends of their dtype."""

import pytest
import torch
from torch import Tensor

from moedge.quant.formats import int3
from moedge.quant.formats.format import get_format
from moedge.quant.tensor import PackedTensor, pack, pack_into
from support.packing_error import relative_error
from support.random_planes import int3_codes

pytestmark = pytest.mark.numerics


def gaussian(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Chunks of 128, 64 (gpt-oss: 2880) and 32 columns.
@pytest.mark.parametrize("num_columns", [768, 192, 96])
def test_codes_lie_where_the_format_says(num_columns: int) -> None:
    numbers = torch.randint(0, 8, (5, num_columns), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    joined = int3.join_rows(numbers)
    assert torch.equal(int3_codes(joined), numbers.int())
    assert torch.equal(int3.split_rows(joined), numbers)


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_on_the_grid_of_a_group_stay_as_they_are(sign: int) -> None:
    """Where the farthest is -4 steps from 0, which is what the sign of a scale is for."""
    steps = torch.randint(-4, 4, (40, 160), generator=torch.Generator().manual_seed(2))
    steps.view(40, 5, 32)[:, :, 7] = -4
    weight = (sign * steps * 0.375).bfloat16()
    assert torch.equal(pack(weight, "int3").dequantize(), weight)


def test_errors_are_those_of_three_bits() -> None:
    weight = gaussian(256, 768)
    error = relative_error(weight, pack(weight, "int3"))
    assert error == pytest.approx(0.1684, abs=1e-3)
    levels = weight.float().view(-1, 32)
    step = levels.abs().amax(1, keepdim=True) / 4
    plain = (levels / step).round().clamp(-4, 3) * step
    assert error < float((plain - levels).norm() / levels.norm()), "scales are fitted"


@pytest.mark.parametrize("largest", [1e-40, 1e-25, 3e38])
def test_groups_of_zeros_and_weights_at_the_ends_of_their_dtype_stay_finite(largest: float) -> None:
    weight = (gaussian(8, 64) / 4).clamp(-1, 1).float().mul(largest).bfloat16()
    weight[3, :32] = 0
    back = pack(weight, "int3").dequantize()
    assert back.isfinite().all()
    assert not back[3, :32].any()
    if largest > 1e-30:
        assert relative_error((weight / largest).bfloat16(), pack((weight / largest).bfloat16(), "int3")) < 0.25


def test_errors_count_by_the_importance_of_their_column() -> None:
    """Where one column in eight counts a hundred times; a factor of all columns changes nothing."""
    weight = gaussian(256, 768)
    importance = torch.where(torch.arange(768) % 8 == 3, 100.0, 1.0)
    layout = get_format("int3").layout((256, 768), "bfloat16")

    def packed(columns: Tensor | None) -> PackedTensor:
        return pack_into(weight, layout, torch.empty(layout.nbytes, dtype=torch.uint8), importance=columns)

    plain, weighted = packed(None), packed(importance)
    lost = [float(((each.dequantize() - weight).float().square() * importance).sum()) for each in (plain, weighted)]
    assert lost[1] < 0.8 * lost[0]
    assert torch.equal(packed(4 * importance).dequantize(), weighted.dequantize())
