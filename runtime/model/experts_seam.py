"""Seam 2: transformers' experts modules call this function; routers, and so routing, stay transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from ...moe.expert import ExpertBody, ExpertSource, mix_experts
from ...quant.kernels.gates import recognise
from ...quant.matmul.matmul import ParallelMatmul


class PackedExperts(nn.Module):
    """A child module that replaces the weight parameters of an experts module."""

    def __init__(self, source: ExpertSource, body: ExpertBody, compute: ParallelMatmul) -> None:
        super().__init__()
        self.source = source
        self.body = body
        self.compute = compute

    def forward(self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        count = self.compute.real_rows(len(hidden))
        if count == len(hidden):
            return mix_experts(hidden, expert_ids, weights, self.source, self.body, self.compute)
        # Padding rows need no expert.
        mine = hidden[:count], expert_ids[:count], weights[:count]
        out = torch.zeros_like(hidden)
        out[:count] = mix_experts(*mine, self.source, self.body, self.compute)
        return out


def register_experts(name: str) -> None:
    ExpertsInterface.register(name, _experts)


def expert_body(module: nn.Module) -> ExpertBody:
    """What the module computes around its matrices, by the attributes that transformers' decorator sets."""
    features: Any = module
    activate: Callable[[torch.Tensor], torch.Tensor] = features._apply_gate if features.has_gate else features.act_fn
    # The oldest supported transformers does not have this attribute.
    has_norm = getattr(features, "has_post_expert_norm", False)
    return ExpertBody(activate, features.post_expert_norm if has_norm else None, recognise(activate))


def _experts(module: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    packed: PackedExperts = module.packed  # type: ignore[assignment]
    out: torch.Tensor = packed(hidden, expert_ids, weights)
    return out
