"""`quant/formats/int2.py`: what codes mean, that no walk loses less, and weights at the ends of their dtype."""

import pytest
import torch
from torch import Tensor

from moedge.quant.formats import int2
from moedge.quant.formats.format import get_format
from moedge.quant.tensor import PackedTensor, pack, pack_into
from support.packing_error import relative_error
from support.random_planes import int2_values

pytestmark = pytest.mark.numerics


def gaussian(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_codes_mean_what_the_format_says() -> None:
    codes = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(int2.numbers_of(codes).flatten(1).double(), int2_values(codes))


def test_values_fit_products_of_bytes_with_a_sign() -> None:
    """Two products of a value's byte and a byte with a sign fit 16 bits."""
    sums = torch.tensor(int2.NEWEST)[:, None] + torch.tensor(int2.MIDDLE)
    assert int(sums.max()) <= 127
    assert min(int2.NEWEST) == min(int2.MIDDLE) == 0


def test_no_walk_from_the_same_state_loses_less() -> None:
    """Against all walks of six free steps: the others have the codes that the search chose."""
    generator = torch.Generator().manual_seed(3)
    numbers, weights = torch.randn(1, 32, generator=generator) * 22, torch.rand(1, 32, generator=generator) + 0.1
    _, state = int2._begin(numbers, weights)
    found = int2._close(numbers, weights, state)

    def loss(walks: Tensor) -> Tensor:
        a, b, c = (walks.roll(distance, -1) for distance in (3, 2, 1))
        values = int2._values().view(-1)[(((a * 4 + b) * 4 + c) * 4 + walks).long()]
        return ((values - numbers).square() * weights).sum(-1)

    every = torch.cartesian_prod(*[torch.arange(4)] * 6)
    for first in range(0, 23, 5):
        others = found.long().repeat(len(every), 1)
        others[:, first : first + 6] = every
        assert float(loss(found.long())) <= float(loss(others).min()) * (1 + 1e-5)


def test_errors_are_less_than_those_of_four_values() -> None:
    """The best four values of a normal weight lose 0.1175 of its squares (Max, 1960)."""
    weight = gaussian(64, 768)
    error = relative_error(weight, pack(weight, "int2"))
    assert error == pytest.approx(0.299, abs=3e-3)
    assert error**2 < 0.1175 * 0.8


def test_errors_count_by_the_importance_of_their_column() -> None:
    weight = gaussian(64, 768)
    importance = torch.where(torch.arange(768) % 8 == 3, 100.0, 1.0)
    layout = get_format("int2").layout((64, 768), "bfloat16")

    def packed(columns: Tensor | None) -> PackedTensor:
        return pack_into(weight, layout, torch.empty(layout.nbytes, dtype=torch.uint8), importance=columns)

    lost = [
        float(((packed(each).dequantize() - weight).float().square() * importance).sum()) for each in (None, importance)
    ]
    assert lost[1] < 0.5 * lost[0]


@pytest.mark.parametrize("largest", [1e-40, 1e-25, 3e38])
def test_groups_of_zeros_and_weights_at_the_ends_of_their_dtype_stay_finite(largest: float) -> None:
    weight = (gaussian(8, 64) / 4).clamp(-1, 1).float().mul(largest).bfloat16()
    weight[3, :32] = 0
    weight[5] = 0
    back = pack(weight, "int2").dequantize()
    assert back.isfinite().all()
    assert float(back[3, :32].float().abs().max()) < 0.02 * float(weight[3].float().abs().max()) + 1e-34
    assert float(back[5].float().abs().max()) < 1e-34
    if largest > 1e-30:
        assert relative_error((weight / largest).bfloat16(), pack((weight / largest).bfloat16(), "int2")) < 0.35
