"""The seam of recurrent layers: the functions that mix tokens in transformers' mixers get the states of a pass.

A mixer's `forward` is transformers' own. Without a cache object it calls a function for its convolution and one for its
scan, by global names of its file. Here it runs with other functions under these names, which call the original ones by
sequence; other models of the same classes are not changed. So a mixer never sees a cache or arguments about packed
sequences, which some of its fallbacks ignore.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils import logging

from ...settings.errors import UnsupportedModel
from ...shape.config import ModelConfig
from ...shape.read import RECURRENT
from .gated_delta import gated_delta_rule, kimi_delta_rule
from .lightning import adapt_lightning
from .mamba import selective_scan
from .mamba2 import chunk_scan
from .pass_states import PassStates

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
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
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
        assert states.pool is not None
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
