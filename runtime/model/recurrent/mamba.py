"""Mamba (Gu and Dao, Linear-Time Sequence Modeling with Selective State Spaces, 2023): Jamba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .pass_states import PassStates


def selective_scan(states: PassStates, layer: int, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Replaces `mamba_selective_scan`; a state is a vector [N] for each of C channels.

    The original cannot start from a state, and goes token by token as this does.
    """
    update = known["mamba_selective_state_update"]

    def forward(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor,
        delta_bias: torch.Tensor | None,
        delta_softplus: bool,
        **others: Any,
    ) -> torch.Tensor:
        """x, dt and z [1, C, T], A [C, N], B and C [1, N, T], D and delta_bias [C] -> [1, C, T]."""
        assert states.pool is not None

        def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            own_x, own_dt, own_b, own_c, own_z = (row.squeeze(1) for row in rows)
            # It changes the state in place.
            out = update(
                state, own_x, own_dt, A, own_b, own_c, D, z=own_z, dt_bias=delta_bias, dt_softplus=delta_softplus
            )
            return out.unsqueeze(1), state

        def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            now = A.new_zeros(1, *A.shape) if state is None else state.clone()
            tokens = [step([row[:, each : each + 1] for row in rows], now)[0] for each in range(rows[0].shape[1])]
            return torch.cat(tokens, 1), now

        inputs = [each.transpose(1, 2) for each in (x, dt, B, C, z)]
        return states.run(states.pool.recurrent(layer), inputs, scan, step).transpose(1, 2)

    return forward
