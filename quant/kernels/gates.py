"""The activations that kernels support, and how a model's activation is recognised as one of them. Triton-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import gelu, silu

from .operands import Gate


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


# The activations that `activation.activate` computes, by name.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": lambda gate, up: silu(gate) * up,
        "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": _clamped_swiglu,
    }
)


def recognise(activate: Callable[[torch.Tensor], torch.Tensor]) -> Gate | None:
    """The gate that computes the same as `activate` on rows [n, 2 I]; None if there is none.

    Compares results for random numbers that exceed every clamp, since a model's code does not name its activation.
    """
    probe = 24 * torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) - 12
    try:
        result = activate(probe)
    except RuntimeError:
        # It has parameters on another device.
        return None
    for name, activation in ACTIVATIONS.items():
        for alternating in (False, True):
            gate, up = (probe[:, ::2], probe[:, 1::2]) if alternating else probe.chunk(2, 1)
            if result.shape == gate.shape and torch.allclose(result, activation(gate, up), rtol=1e-5, atol=1e-5):
                return Gate(name, alternating)
    return None
