"""Gated delta nets (Yang et al., Gated Delta Networks, 2024): Qwen3-Next, Qwen3.5, OLMo Hybrid.

Kimi Delta Attention (Kimi Team, Kimi Linear, 2025), of Kimi Linear and Ling, has a decay for each element of a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
            if state.device.type == "cpu":
                return delta_step(rows, state).to(value.dtype), state
            q, k, v, decay, strength = rows
            out, after = recurrent(q, k, v, g=decay, beta=strength, initial_state=state, **same)
            return out, after

        def prepare(rows: Any) -> Any:
            on_cpu = value.device.type == "cpu"
            return delta_operands(rows, use_qk_l2norm_in_kernel) if on_cpu else rows

        inputs = (query, key, value, g, beta)
        return states.run(states.pool.recurrent(layer), inputs, scan, step, prepare), None

    return forward


def delta_operands(rows: Any, normalized: bool) -> tuple[torch.Tensor, ...]:
    """What `delta_step` multiplies, in float32, of one token of n sequences, as both rules get it.

    Queries and keys [n, H, 2, K], values [n, H, V], decays [n, H, 1] or [n, H, K] and, [n, H, 1], strengths and the
    products of each query with its key.
    """
    q, k, v, decay, strength = (row.squeeze(1).float() for row in rows)
    both = torch.stack((q, k), 2)
    if normalized:
        both = both * torch.rsqrt(both.square().sum(-1, keepdim=True) + 1e-6)
    both[:, :, 0] *= both.shape[-1] ** -0.5
    overlap = (both[:, :, 0] * both[:, :, 1]).sum(-1, keepdim=True)
    both, overlap = (each.repeat_interleave(v.shape[1] // each.shape[1], 1) for each in (both, overlap))
    return both, v, decay.exp().view(*v.shape[:2], -1), strength.unsqueeze(-1), overlap


def delta_step(operands: Sequence[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """One token of n sequences, of which it gets `delta_operands`, -> [n, 1, H, V]; changes `state` [n, H, K, V].

    transformers' code makes five copies of the state, this none: with S' = exp(g) S + k d^T, where d is what k does not
    yet read right, the output S'^T q is exp(g) S^T q + (k . q) d. So one product reads S for q and for k. There is a
    decay for each head, or for each element of its keys (Kimi).
    """
    both, v, decay, strength, overlap = (each.flatten(0, 1) for each in operands)
    own = state.view(-1, *state.shape[2:]).mul_(decay.unsqueeze(-1))
    read = torch.bmm(both, own)
    missing = (v - read[:, 1]) * strength
    own.baddbmm_(both[:, 1].unsqueeze(-1), missing.unsqueeze(1))
    return torch.addcmul(read[:, 0], overlap, missing).view(len(state), 1, -1, v.shape[-1])
