"""The states of recurrent layers, by family: what a sequence keeps of its past in layers without keys and values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from ...offload.checkpoint.header import TensorEntry
from ..settings.errors import UnsupportedModel
from .config import ModelConfig
from .model_shape import StateGroup

_CONVOLUTION = re.compile(r"(^|[._])conv(1d)?\.weight$")
_ATTENTION = re.compile(r"(^|\.)(self_attn|attention|mixer)\.(k_proj|kv_a_proj_with_mqa)\.")
# Modules under the name of attention that are recurrent.
_RECURRENT_ATTENTION = re.compile(r"(^|\.)(self_attn|attention)\.\w*conv1d\.")
# Channels of the convolution, tokens that it spans (0 of both without one), and the shape of the scan's state.
_State = tuple[int, int, tuple[int, ...]]


def is_convolution(name: str) -> bool:
    """Whether a tensor of a layer holds the kernel [C, 1, K] of a causal convolution."""
    return _CONVOLUTION.search(name) is not None


def attends(tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether a layer with recurrent ones beside it, by the names of its tensors, has keys and values."""
    return any(map(_ATTENTION.search, tensors)) and not any(map(_RECURRENT_ATTENTION.search, tensors))


def state_groups(config: ModelConfig, layers: Mapping[int, Mapping[str, TensorEntry]]) -> tuple[StateGroup, ...]:
    """Recurrent layers, grouped by what a sequence keeps in them; empty for families that have none.

    Raises UnsupportedModel where the files hold other convolutions than the config describes, or no attention.
    """
    rule = RECURRENT.get(config.family.model_type)
    if rule is None:
        return ()
    channels, width, recurrent = rule(config)
    found: dict[StateGroup, list[int]] = defaultdict(list)
    for index, tensors in sorted(layers.items()):
        kernels = [entry.shape for name, entry in tensors.items() if is_convolution(name)]
        if not width and not attends(tensors):
            found[StateGroup((), (), recurrent)].append(index)
        if not kernels:
            continue
        # Some files have a kernel each for queries, keys and values.
        if sum(shape[0] for shape in kernels) != channels or {shape[1:] for shape in kernels} != {(1, width)}:
            raise UnsupportedModel(f"layer {index}: convolution {kernels}, config.json says {[channels, 1, width]}")
        found[StateGroup((), (channels, width - 1), recurrent)].append(index)
    if not any(map(attends, layers.values())):
        raise UnsupportedModel("no layer has attention: models of recurrent layers alone do not run yet")
    return tuple(StateGroup(tuple(each), group.conv, group.recurrent) for group, each in found.items())


def _gated_delta(config: ModelConfig) -> _State:
    """Gated delta nets: one matrix [K, V] per value head."""
    heads = config.get("num_attention_heads")
    keys = config.get("linear_num_key_heads") or heads
    values = config.get("linear_num_value_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config.size("hidden_size") / keys)
    value_dim = config.get("linear_value_head_dim") or 2 * key_dim
    channels = 2 * keys * key_dim + values * value_dim
    return channels, config.size("linear_conv_kernel_dim"), (values, key_dim, value_dim)


def _kimi_delta(config: ModelConfig) -> _State:
    """Kimi Delta Attention: one matrix [K, V] per head."""
    heads = config.get("linear_num_heads") or config.size("num_attention_heads")
    dim = config.get("linear_head_dim") or config.size("head_dim")
    width = config.get("short_conv_kernel_size") or config.size("linear_conv_kernel_dim")
    return 3 * heads * dim, width, (heads, dim, dim)


def _lightning(config: ModelConfig) -> _State:
    """Lightning attention: one matrix [K, V] per head, and no convolution."""
    heads = config.size("num_attention_heads")
    dim = config.get("head_dim") or config.size("hidden_size") // heads
    return 0, 0, (heads, dim, dim)


def _mamba2(config: ModelConfig) -> _State:
    """Mamba-2: one matrix [P, N] per head."""
    inner = config.get("mamba_d_ssm") or int(config.get("mamba_expand") * config.size("hidden_size"))
    heads, size = config.size("mamba_n_heads"), config.size("mamba_d_state")
    channels = inner + 2 * config.size("mamba_n_groups") * size
    return channels, config.size("mamba_d_conv"), (heads, inner // heads, size)


def _nemotron(config: ModelConfig) -> _State:
    heads, dim, size = (config.size(name) for name in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"))
    channels = heads * dim + 2 * config.size("n_groups") * size
    return channels, config.size("conv_kernel"), (heads, dim, size)


def _mamba(config: ModelConfig) -> _State:
    """Mamba-1: one vector [N] per channel."""
    channels = int(config.get("mamba_expand") * config.size("hidden_size"))
    return channels, config.size("mamba_d_conv"), (channels, config.size("mamba_d_state"))


def _short_convolution(config: ModelConfig) -> _State:
    return config.size("hidden_size"), config.size("conv_L_cache"), ()


RECURRENT: Mapping[str, Callable[[ModelConfig], _State]] = {
    "bailing_hybrid": _kimi_delta,
    "bamba": _mamba2,
    "falcon_h1": _mamba2,
    "granitemoehybrid": _mamba2,
    "jamba": _mamba,
    "kimi_linear": _kimi_delta,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "lfm3": _short_convolution,
    "minimax": _lightning,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
}
