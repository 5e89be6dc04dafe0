"""Adapts mixtures some of whose experts return their input, which are outside transformers' experts interface."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def adapt(model: nn.Module) -> None:
    """Gives the experts of such modules the attributes that the experts seam reads; parameters and names stay."""
    module: Any
    for module in model.modules():
        if hasattr(module, "zero_expert_num") and hasattr(module, "down_proj"):
            _adapt(module)


def _adapt(experts: Any) -> None:
    count = experts.num_experts = experts.num_routed_experts
    experts.is_transposed, experts.has_gate, experts.has_bias, experts.has_post_expert_norm = False, True, False, False
    experts._apply_gate = partial(_activate, activation=experts.act_fn)
    # The class allocates first matrices for all experts, second ones for those that have any.
    up = experts.gate_up_proj
    experts.gate_up_proj = nn.Parameter(up.new_empty(count, *up.shape[1:]), requires_grad=False)
    experts.forward = partial(_mix, experts, count)


def _activate(gate_up: torch.Tensor, activation: nn.Module) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out: torch.Tensor = activation(gate) * up
    return out


def _mix(
    experts: Any, count: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The routed sum: hidden [T, D], expert_ids and weights [T, A]; ids from `count` on return their input.

    Such a choice becomes one of another expert of the same token, which is read anyway, with weight zero.
    """
    idle = expert_ids >= count
    another = expert_ids.masked_fill(idle, count).amin(1, keepdim=True)
    chosen = torch.where(idle, another.masked_fill(another == count, 0), expert_ids)
    out: torch.Tensor = experts.packed(hidden, chosen, weights.masked_fill(idle, 0))
    return out + hidden * weights.masked_fill(~idle, 0).sum(1, keepdim=True).to(hidden.dtype)
