"""Gated delta nets (Yang et al., Gated Delta Networks, 2024): Qwen3-Next, Qwen3.5, OLMo Hybrid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...kv.spec import SCAN_CHUNK
from .pass_states import PassStates


def gated_delta_rule(states: PassStates, layer: int, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Replaces `torch_chunk_gated_delta_rule`; a state is a matrix [K, V] for each of H value heads."""
    chunks, recurrent = known["torch_chunk_gated_delta_rule"], known["torch_recurrent_gated_delta_rule"]

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query and key [1, T, Hk, K], value [1, T, H, V], g and beta [1, T, H] -> [1, T, H, V]."""
        assert states.pool is not None
        same = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        size = {"chunk_size": SCAN_CHUNK} if states.tiled else {}

        def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, decay, strength = rows
            out, after = chunks(q, k, v, g=decay, beta=strength, initial_state=state, **size, **same)
            return out, after

        def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v, decay, strength = rows
            out, after = recurrent(q, k, v, g=decay, beta=strength, initial_state=state, **same)
            return out, after

        return states.run(states.pool.recurrent(layer), (query, key, value, g, beta), scan, step), None

    return forward
