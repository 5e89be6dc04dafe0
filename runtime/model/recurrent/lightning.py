"""Lightning attention (Qin et al., Lightning Attention-2, 2024): MiniMax-Text-01."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kv.spec import SCAN_CHUNK, SCAN_TOKENS
from .pass_states import PassStates

# Buffers of transformers' module for chunks of 256 tokens, tens of MiB a layer; here chunks are shorter.
_DECAYS = ("query_decay", "key_decay", "diagonal_decay")


def shed_decays(model: nn.Module) -> None:
    """Removes from a model's lightning attention the buffers that `adapt_lightning` computes from `slope_rate`."""
    for module in model.modules():
        if hasattr(module, "slope_rate"):
            for name in _DECAYS:
                delattr(module, name)


def adapt_lightning(module: Any, states: PassStates) -> None:
    """Replaces the `forward` of a lightning attention: transformers' own mixes tokens inside of it.

    A state is a matrix [K, V] for each of H heads, in float32. Linears and norms stay the module's.
    """
    layer, heads = int(module.layer_idx), int(module.num_attention_heads)

    def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return _scan(module.slope_rate, rows, state, SCAN_CHUNK if states.tiled else SCAN_TOKENS)

    def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (row.transpose(1, 2).float() for row in rows)
        after = torch.exp(-module.slope_rate) * state + k.transpose(-1, -2) @ v
        return (q @ after).transpose(1, 2), after

    def forward(hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, D] -> ([1, T, D], None)."""
        assert states.pool is not None
        qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (heads, -1))
        mixed = states.run(states.pool.recurrent(layer), qkv.chunk(3, dim=-1), scan, step)
        mixed = module.norm(mixed.flatten(2).to(hidden_states.dtype))
        return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * mixed), None

    module.forward = forward


def _scan(slope: torch.Tensor, rows: Any, state: torch.Tensor | None, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows q, k and v [1, t, H, K] after `state` [1, H, K, K] -> [1, t, H, K] and the state after them.

    A token's share of the state shrinks by exp(-slope) with every token; `slope` is [H, 1, 1].
    """
    q, k, v = (row.transpose(1, 2).float() for row in rows)
    if state is None:
        state = q.new_zeros(1, q.shape[1], q.shape[-1], v.shape[-1])
    outputs = []
    for begin in range(0, q.shape[2], size):
        own_q, own_k, own_v = (each[:, :, begin : begin + size] for each in (q, k, v))
        count = own_q.shape[2]
        position = torch.arange(1, count + 1, device=q.device).view(-1, 1)
        distance = position - position.T
        decay = torch.exp(-slope * distance.clamp(min=0)).masked_fill(distance < 0, 0.0)
        inside = (own_q @ own_k.transpose(-1, -2) * decay) @ own_v
        outputs.append(inside + (own_q * torch.exp(-slope * position)) @ state)
        fed = (own_k * torch.exp(-slope * (count - position))).transpose(-1, -2) @ own_v
        state = state * torch.exp(-slope * count) + fed
    return torch.cat(outputs, 2).transpose(1, 2), state
