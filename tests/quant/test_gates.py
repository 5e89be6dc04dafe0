"""Gates are recognised by what they compute (`quant/kernels/operands.py`), with every clamp, and nothing else is taken
for one.
"""

import pytest
import torch
from torch.nn.functional import gelu, silu

from moedge.quant.kernels.operands import ACTIVATIONS, Gate, recognise


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("alternating", [False, True])
def test_every_gate_is_recognised(name: str, alternating: bool) -> None:
    def activate(rows: torch.Tensor) -> torch.Tensor:
        halves = (rows[:, ::2], rows[:, 1::2]) if alternating else rows.chunk(2, 1)
        return ACTIVATIONS[name](*halves)

    assert recognise(activate) == Gate(name, alternating)


@pytest.mark.parametrize(
    "activate",
    [
        silu,
        lambda rows: silu(rows[:, 32:]) * rows[:, :32],
        lambda rows: gelu(rows[:, :32]) * rows[:, 32:],
        lambda rows: silu(rows[:, :32].clamp(max=10)) * rows[:, 32:],
        lambda rows: silu(rows[:, :32]) * rows[:, 32:].clamp(-10, 10),
        torch.nn.Linear(64, 32, device="meta"),
    ],
    ids=["no gate", "up first", "exact gelu", "clamped gate", "clamped up", "elsewhere"],
)
def test_what_no_kernel_computes_is_not_recognised(activate: object) -> None:
    assert recognise(activate) is None
