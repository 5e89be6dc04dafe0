"""Gated delta nets (Yang et al., Gated Delta Networks, 2024): Qwen3-Next, Qwen3.5, OLMo Hybrid.

Kimi Delta Attention (Kimi Team, Kimi Linear, 2025), of Kimi Linear and Ling, has a decay for each element of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...kv.spec import SCAN_CHUNK
from .pass_states import PassStates

# Tokens that the chunks of Kimi Delta Attention get at a time: transformers' torch code makes a matrix of pairs of a
# chunk's tokens for every element of a key.
KIMI_TOKENS = 64
Function = Callable[..., Any]


def gated_delta_rule(states: PassStates, layer: int, known: Mapping[str, Function]) -> Function:
    """Replaces `torch_chunk_gated_delta_rule`; a state is a matrix [K, V] for each of H value heads."""
    return _replaced(states, layer, known["torch_chunk_gated_delta_rule"], known["torch_recurrent_gated_delta_rule"])


def kimi_delta_rule(states: PassStates, layer: int, known: Mapping[str, Function]) -> Function:
    """Replaces `chunk_kimi_delta_attention`; the same states, and `g` [1, T, H, K]."""
    chunks = known["chunk_kimi_delta_attention"]

    def in_parts(
        *whole: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor | None, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = []
        for begin in range(0, g.shape[1], KIMI_TOKENS):
            q, k, v, decay, strength = (each[:, begin : begin + KIMI_TOKENS] for each in (*whole, g, beta))
            size = {"chunk_size": SCAN_CHUNK, **others}
            out, initial_state = chunks(q, k, v, g=decay, beta=strength, initial_state=initial_state, **size)
            parts.append(out)
        return torch.cat(parts, 1), initial_state

    return _replaced(states, layer, in_parts, known["recurrent_kimi_delta_attention"])


def _replaced(states: PassStates, layer: int, chunks: Function, recurrent: Function) -> Function:

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query and key [1, T, Hk, K], value [1, T, H, V], beta [1, T, H], g like beta or [1, T, H, K] -> value."""
        assert states.pool is not None
        same = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        size = {"chunk_size": SCAN_CHUNK} if states.tiled else {}

        def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, decay, strength = rows
            out, after = chunks(q, k, v, g=decay, beta=strength, initial_state=state, **size, **same)
            return out, after

        def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, decay, strength = rows
            if state.device.type == "cpu":
                return delta_step(rows, state, use_qk_l2norm_in_kernel), state
            out, after = recurrent(q, k, v, g=decay, beta=strength, initial_state=state, **same)
            return out, after

        return states.run(states.pool.recurrent(layer), (query, key, value, g, beta), scan, step), None

    return forward


def delta_step(rows: Any, state: torch.Tensor, normalized: bool) -> torch.Tensor:
    """One token of n sequences, as both rules get it -> [n, 1, H, V]; changes `state` [n, H, K, V] in place.

    transformers' code makes five copies of the state, this none: with S' = exp(g) S + k d^T, where d is what k does not
    yet read right, the output S'^T q is exp(g) S^T q + (k . q) d. So one product reads S for q and for k. There is a
    decay for each head, or for each element of its keys (Kimi).
    """
    q, k, v, decay, strength = (row.squeeze(1).float() for row in rows)
    n, heads, keys, values = state.shape
    both = torch.stack((q, k), 2)
    if normalized:
        both = both * torch.rsqrt(both.square().sum(-1, keepdim=True) + 1e-6)
    both[:, :, 0] *= keys**-0.5
    both = both.repeat_interleave(heads // both.shape[1], 1).flatten(0, 1)
    own = state.view(n * heads, keys, values).mul_(decay.exp().view(n * heads, -1, 1))
    read = torch.bmm(both, own)
    missing = ((v.flatten(0, 1) - read[:, 1]) * strength.view(-1, 1)).unsqueeze(1)
    own.baddbmm_(both[:, 1].unsqueeze(-1), missing)
    overlap = (both[:, 0] * both[:, 1]).sum(-1, keepdim=True)
    out: torch.Tensor = (read[:, 0] + overlap * missing.squeeze(1)).view(n, 1, heads, values).to(rows[0].dtype)
    return out
