"""The seam of recurrent layers: the functions that mix tokens in transformers' mixers get the states of a pass.

A mixer's `forward` is transformers' own. Without a cache object it calls a function for its convolution and one for its
scan, by global names of its file. Here it runs with other functions under these names, which call the original ones by
sequence; other models of the same classes are not changed. So a mixer never sees a cache or arguments about packed
sequences, which some of its fallbacks ignore.

- Gated delta nets (Yang et al., Gated Delta Networks, 2024): Qwen3-Next, Qwen3.5, OLMo Hybrid. Kimi Delta Attention
  (Kimi Team, Kimi Linear, 2025), of Kimi Linear and Ling, has a decay for each element of a key.
- Lightning attention (Qin et al., Lightning Attention-2, 2024): MiniMax-Text-01.
- Mamba (Gu and Dao, Linear-Time Sequence Modeling with Selective State Spaces, 2023): Jamba.
- Mamba-2 (Dao and Gu, Transformers are SSMs, 2024): Granite 4, Bamba, Nemotron-H, Falcon-H1, Zamba2.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils import logging

from ...kv.spec import SCAN_CHUNK, SCAN_TOKENS
from ...settings.errors import UnsupportedModel
from ...shape.config import ModelConfig
from ...shape.read import RECURRENT
from .ngrams import adapt_ngrams
from .pass_states import PassStates

# Tokens that the chunks of Kimi Delta Attention get at a time: transformers' torch code makes a matrix of pairs of a
# chunk's tokens for every element of a key.
KIMI_TOKENS = 64


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


# The global names of functions that mix tokens, and what replaces them.
Function = Callable[..., Any]
_SCANS: Mapping[str, Callable[[PassStates, int, Mapping[str, Function]], Function]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": kimi_delta_rule,
    "mamba2_chunk_scan": chunk_scan,
    "mamba_selective_scan": selective_scan,
}
_CONVOLUTION = "causal_conv1d_fn"


def adapt_recurrences(model: nn.Module, config: ModelConfig) -> PassStates | None:
    """Gives every recurrent layer of a model its functions; None where the family has no such layers.

    Raises UnsupportedModel where this release of transformers has other mixers.
    """
    if config.family.model_type not in RECURRENT:
        return None
    # It advises, once for each function, to install kernels that no CPU has; docs/dev/gpu.md names them.
    logging.get_logger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    states, adapted = PassStates(), 0
    for module in model.modules():
        if hasattr(module, "short_conv_state_len"):
            adapt_ngrams(module, states, config.size("num_hidden_layers"))
        elif any(isinstance(child, nn.Conv1d) for child in module.children()):
            _adapt(module, states)
            adapted += 1
        elif hasattr(module, "slope_rate"):
            adapt_lightning(module, states)
            adapted += 1
    if not adapted:
        raise UnsupportedModel(f"no layer of {type(model).__name__} is recurrent, which config.json says it is")
    return states


def _adapt(module: Any, states: PassStates) -> None:
    plain = inspect.unwrap(type(module).forward)
    known = plain.__globals__
    names = {name for name in (_CONVOLUTION, *_SCANS) if name in plain.__code__.co_names and name in known}
    # A mixer with a state of its own beside that of its convolution would lose it.
    scans = names - {_CONVOLUTION}
    decays = any(name.endswith("A_log") for name, _ in module.named_parameters())
    if _CONVOLUTION not in names or len(scans) != decays:
        raise UnsupportedModel(
            f"{type(module).__name__} of this release of transformers mixes tokens by {sorted(names) or 'other'} "
            f"functions; a newer one is wanted, with {_CONVOLUTION} and one of {', '.join(_SCANS)}"
        )
    # Bounds of the steps of time hold in scans only.
    least, most = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    states.stepwise |= least > 0 or most < math.inf
    layer = int(module.layer_idx)
    own = {name: _SCANS[name](states, layer, known) for name in scans}
    own[_CONVOLUTION] = _convolution(states, layer, known)
    forward = FunctionType(plain.__code__, {**known, **own}, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    module.forward = MethodType(forward, module)


def _convolution(states: PassStates, layer: int, known: Mapping[str, Function]) -> Function:
    """A causal convolution over x [1, C, T] with kernels `weight` [C, K]; a state is a sequence's last K - 1 inputs."""
    convolve, update = known[_CONVOLUTION], known["causal_conv1d_update"]

    def forward(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Any = None, **others: Any
    ) -> torch.Tensor:
        kept = weight.shape[-1] - 1

        def scan(rows: Any, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            (row,) = rows
            inputs = row.transpose(1, 2)
            before = inputs.new_zeros(1, inputs.shape[1], kept) if state is None else state.to(inputs.dtype)
            whole = torch.cat([before, inputs], -1)
            out = convolve(whole, weight, bias, activation=activation)[:, :, kept:]
            return out.transpose(1, 2), whole[:, :, -kept:]

        def step(rows: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (row,) = rows
            if state.device.type == "cpu":
                return _convolve_step(row, state, weight, bias, activation), state
            own = state.contiguous()
            return update(row.transpose(1, 2).contiguous(), own, weight, bias, activation).transpose(1, 2), own

        return states.run(states.pool.conv(layer), (x.transpose(1, 2),), scan, step).transpose(1, 2)

    return forward


def _convolve_step(
    row: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
) -> torch.Tensor:
    """One input each of n sequences, row [n, 1, C] -> [n, 1, C]; changes `state` [n, C, K - 1] in place.

    transformers' code gives torch a convolution over K tokens, which goes channel by channel.
    """
    window, taps = state.transpose(1, 2), weight.T.float()
    out = row.float() * taps[-1]
    for position in range(window.shape[1]):
        out.addcmul_(window[:, position : position + 1].float(), taps[position])
    window.copy_(torch.cat([window[:, 1:], row], 1))
    out = (out if bias is None else out + bias).to(row.dtype)
    return out if activation is None else ACT2FN[activation](out)
