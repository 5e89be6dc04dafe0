"""Adapts llama4 to the seams, outside which it computes its experts and the scale of its queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

# An attribute of an attention module: a function of queries [1, H, T, D] and positions [1, T].
RESCALE = "rescale_queries"


def adapt(model: nn.Module) -> None:
    """Changes the methods of a llama4 model's modules; their parameters and names stay."""
    adapt_decoder(model)
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            _adapt_experts(module)
        elif getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            # transformers counts positions from the pass's first token, not the sequence's.
            module.attn_temperature_tuning = False
            setattr(module, RESCALE, partial(_rescale, scale=module.attn_scale, floor=module.floor_scale))


def adapt_decoder(model: nn.Module) -> None:
    """Makes the model find its decoder: the class's own method expects the model that also reads pictures."""
    if type(model).__name__ == "Llama4ForCausalLM":
        model.get_decoder = lambda: model.model  # type: ignore[assignment]


def _adapt_experts(moe: Any) -> None:
    """Runs the chosen experts; transformers runs every expert on every token, most of them on zeros.

    In this family a router's weight multiplies an expert's input, not its output.
    """
    experts = moe.experts
    experts.is_transposed, experts.has_gate, experts.has_bias, experts.has_post_expert_norm = True, True, False, False
    experts._apply_gate = partial(_activate, activation=experts.act_fn)

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.reshape(-1, moe.hidden_dim)
        scores, logits = moe.router(rows)
        weights, expert_ids = scores.topk(moe.top_k, dim=-1)
        inputs = (rows.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
        routed = experts.packed(inputs, expert_ids.reshape(-1, 1), weights.new_ones(len(inputs), 1))
        out = moe.shared_expert(rows) + routed.view(len(rows), moe.top_k, -1).sum(dim=1)
        return out, logits

    moe.forward = forward


def _activate(gate_up: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * activation(gate)


def _rescale(queries: torch.Tensor, positions: torch.Tensor, scale: float, floor: float) -> torch.Tensor:
    """Scales queries by their position: layers without rotary embedding sharpen attention far from the start."""
    factors = torch.log1p(torch.floor((positions.to(queries.device).float() + 1.0) / floor)) * scale + 1.0
    return (queries * factors.unsqueeze(1).unsqueeze(-1)).to(queries.dtype)
