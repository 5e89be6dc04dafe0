"""Mamba-2 (Dao and Gu, Transformers are SSMs, 2024): Granite 4, Bamba, Nemotron-H, Falcon-H1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
            if state.device.type == "cpu":
                return ssm_step(rows, state), state
            own_x, own_dt, own_b, own_c = (row.squeeze(1) for row in rows)
            heads, width, size = state.shape[1:]
            by_channel = (heads, width)
            # It changes the state in place.
            out = update(
                state, own_x, own_dt.unsqueeze(-1).expand(-1, *by_channel), A.view(-1, 1, 1).expand(heads, width, size),
                own_b, own_c, D.view(-1, 1).expand(by_channel), z=None, dt_bias=dt_bias.view(-1, 1).expand(by_channel),
                dt_softplus=dt_softplus,
            )  # fmt: skip
            return out.unsqueeze(1).to(x.dtype), state

        def prepare(rows: Any) -> Any:
            if x.device.type != "cpu":
                return rows
            own_x, own_dt, own_b, own_c = (row.squeeze(1) for row in rows)
            own_dt = own_dt + dt_bias.to(dt.dtype)
            return ssm_operands((own_x, F.softplus(own_dt) if dt_softplus else own_dt, own_b, own_c), A, D)

        return states.run(states.pool.recurrent(layer), (x, dt, B, C), scan, step, prepare)

    return forward


def ssm_operands(rows: Any, A: torch.Tensor, D: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What `ssm_step` multiplies of one token of n sequences: x [n, H, P], dt [n, H], B and C [n, G, N].

    In float32 what is fed [n, H, P, 1] and decays [n, H, 1, 1], B [n, H, 1, N] and C [n, H, N, 1]; x times D [n, H, P].
    """
    x, dt, b, c = (row.float() for row in rows)
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    fed, decay = x * dt.unsqueeze(-1), (dt * A.float()).exp()
    return fed.unsqueeze(-1), decay.view(*decay.shape, 1, 1), b.unsqueeze(2), c.unsqueeze(3), rows[0] * D.view(-1, 1)


def ssm_step(operands: Sequence[torch.Tensor], state: torch.Tensor) -> torch.Tensor:
    """One token of n sequences, of which it gets `ssm_operands`, -> [n, 1, H, P] in the dtype of x.

    Changes `state` [n, H, P, N] in place: exp(dt A) S + dt x B^T, of which C reads the output. transformers' code makes
    three copies of it.
    """
    fed, decay, b, c, skipped = (each.flatten(0, 1) for each in operands)
    own = state.view(-1, *state.shape[2:]).mul_(decay)
    own.baddbmm_(fed, b)
    out = torch.bmm(own, c).squeeze(-1).to(skipped.dtype) + skipped
    return out.view(len(state), 1, *state.shape[1:3])
