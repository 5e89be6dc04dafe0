"""Which activations kernels know, and how to tell that a model's is one of them. Free of Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import gelu, silu

from .operands import Gate


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


# What `activation.activate` computes.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": lambda gate, up: silu(gate) * up,
        "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": _clamped_swiglu,
    }
)


def recognise(activate: Callable[[torch.Tensor], torch.Tensor]) -> Gate | None:
    """The gate that computes what `activate` does with rows [n, 2 I], None if there is none.

    By what it does to numbers beyond every clamp, since a model's code does not say what it is.
    """
    probe = 24 * torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) - 12
    try:
        result = activate(probe)
    except RuntimeError:
        # It has parameters, and on another device.
        return None
    for name, activation in ACTIVATIONS.items():
        for alternating in (False, True):
            gate, up = (probe[:, ::2], probe[:, 1::2]) if alternating else probe.chunk(2, 1)
            if result.shape == gate.shape and torch.allclose(result, activation(gate, up), rtol=1e-5, atol=1e-5):
                return Gate(name, alternating)
    return None
