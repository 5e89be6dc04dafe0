"""Mamba-2 (Dao and Gu, Transformers are SSMs, 2024): Granite 4, Bamba, Nemotron-H, Falcon-H1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ...kv.spec import SCAN_CHUNK, SCAN_TOKENS
from .pass_states import PassStates


def chunk_scan(states: PassStates, layer: int, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Replaces `mamba2_chunk_scan`; a state is a matrix [P, N] for each of H heads."""
    scan_chunks, update = known["mamba2_chunk_scan"], known["mamba2_selective_state_update"]

    def forward(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        **others: Any,
    ) -> torch.Tensor:
        """x [1, T, H, P], dt [1, T, H], A, D and dt_bias [H], B and C [1, T, G, N] -> [1, T, H, P]."""
        assert states.pool is not None
        # The size only decides how the sum is computed; larger chunks take more memory than these (kv/spec.py).
        size = SCAN_CHUNK if states.tiled else SCAN_TOKENS

        def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            own_x, own_dt, own_b, own_c = rows
            out, after = scan_chunks(
                own_x, own_dt, A, own_b, own_c, chunk_size=size, D=D, z=None, dt_bias=dt_bias, dt_softplus=dt_softplus,
                dt_limit=dt_limit, initial_states=state, return_final_states=True,
            )  # fmt: skip
            return out.to(x.dtype), after

        def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own_x, own_dt, own_b, own_c = (row.squeeze(1) for row in rows)
            if state.device.type == "cpu":
                own_dt = own_dt + dt_bias.to(own_dt.dtype)
                own_dt = F.softplus(own_dt) if dt_softplus else own_dt
                out = ssm_step((own_x, own_dt, own_b, own_c), state, A)
                return (out.to(x.dtype) + own_x * D.view(-1, 1)).to(x.dtype).unsqueeze(1), state
            heads, width, size = state.shape[1:]
            by_channel = (heads, width)
            # It changes the state in place.
            out = update(
                state, own_x, own_dt.unsqueeze(-1).expand(-1, *by_channel), A.view(-1, 1, 1).expand(heads, width, size),
                own_b, own_c, D.view(-1, 1).expand(by_channel), z=None, dt_bias=dt_bias.view(-1, 1).expand(by_channel),
                dt_softplus=dt_softplus,
            )  # fmt: skip
            return out.unsqueeze(1).to(x.dtype), state

        return states.run(states.pool.recurrent(layer), (x, dt, B, C), scan, step)

    return forward


def ssm_step(rows: Any, state: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """One token of n sequences: x [n, H, P], dt [n, H], B and C [n, G, N] -> [n, H, P] in float32.

    Changes `state` [n, H, P, N] in place: exp(dt A) S + dt x B^T, of which C reads the output. transformers' code makes
    three copies of it.
    """
    x, dt, b, c = (row.float() for row in rows)
    n, heads, width, size = state.shape
    b, c = (each.repeat_interleave(heads // each.shape[1], 1).reshape(-1, size, 1) for each in (b, c))
    own = state.view(n * heads, width, size).mul_((dt * A.float()).exp().view(-1, 1, 1))
    own.baddbmm_((x * dt.unsqueeze(-1)).reshape(-1, width, 1), b.transpose(1, 2))
    return torch.bmm(own, c).view(n, heads, width)
