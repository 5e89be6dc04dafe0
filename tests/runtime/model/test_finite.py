"""One bad value anywhere in a parameter is found (`runtime/model/loading.py`), of whatever dtype, and named."""

import pytest
import torch
from torch import nn

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.loading import refuse_nonfinite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model(dtype: torch.dtype) -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(67), "gate": nn.Linear(67, 3)}).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_position_is_seen(dtype: torch.dtype, value: float) -> None:
    for position in range(67):
        spoiled = model(dtype)
        spoiled["norm"].weight.data[position] = value
        with pytest.raises(BadCheckpoint, match=r"norm\.weight: 1 of 67 values"):
            refuse_nonfinite(spoiled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_but_finite_values_pass(dtype: torch.dtype) -> None:
    extreme = model(dtype)
    for parameter in extreme.parameters():
        parameter.data.fill_(torch.finfo(dtype).max)
        parameter.data.view(-1)[0] = torch.finfo(dtype).min
    refuse_nonfinite(extreme)


def test_parameters_without_values_are_left_alone() -> None:
    refuse_nonfinite(nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.Linear(0, 2)]))
