"""Seam 1: transformers calls this function instead of its own attention; the pass is a keyword of `model(...)`."""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention.protocol import AttentionBackend, AttentionCall, IndexQuery
from ..engine.sequence import Batch
from ..settings.errors import UnsupportedModel
from .latent_seam import latent_weights
from .llama4 import RESCALE

_HONOURED = {"sliding_window", "softcap", "s_aux"}
# Arguments that cannot change the result of a pass that wants no gradients, router outputs or caches.
_HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "cache_position",
    "is_causal",
}


@dataclass(frozen=True, slots=True)
class PackedPass:
    """An argument of `model(..., packed=...)` that transformers passes unchanged to every layer's attention.

    `positions` [1, T] are the batch's; they are arbitrary for padding rows behind its tokens.
    """

    batch: Batch
    attention: AttentionBackend
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Visibility:
    """Passed instead of a mask tensor: the number of tokens that a layer looks back, None for all."""

    window: int | None

    def __getitem__(self, part: Any) -> Visibility:
        """Some modules take a head's mask for their indexer."""
        return self


def register_attention(name: str) -> None:
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _visibility)


def hand_on_passes(model: torch.nn.Module) -> None:
    """Makes decoder layers that drop unknown arguments give their attention the pass."""
    layer: Any
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        attention = getattr(layer, "self_attn", None)
        if attention is not None and _drops_arguments(layer):
            layer.register_forward_pre_hook(partial(_keep_pass, attention), with_kwargs=True)
            attention.register_forward_pre_hook(_give_pass, with_kwargs=True)


def _drops_arguments(layer: Any) -> bool:
    """Whether the code of a layer's `forward` takes `**kwargs` and never reads them."""
    code = inspect.unwrap(type(layer).forward).__code__
    loaded = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST")]
    return "kwargs" in code.co_varnames and not any("kwargs" in (x if isinstance(x, tuple) else (x,)) for x in loaded)


def _keep_pass(attention: Any, layer: torch.nn.Module, args: Any, arguments: dict[str, Any]) -> None:
    attention.handed_on = {"packed": arguments["packed"]}


def _give_pass(attention: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, arguments | attention.handed_on


def _visibility(*args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> Visibility:
    if use_vmap:
        raise UnsupportedModel("the model adds its own mask function to causal attention, which moedge cannot apply")
    return Visibility(local_size)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Visibility | None,
    *,
    packed: PackedPass,
    scaling: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] after rotary embedding -> ([1, T, Hq, D], None).

    For latent attention key and value are latents [1, 1, T, R] and rotated keys [1, 1, T, P].
    Raises UnsupportedModel for a feature that moedge does not know.
    """
    index = features.pop("indices", None)
    if not isinstance(index, IndexQuery | None):
        raise UnsupportedModel(f"{type(module).__name__} chooses tokens itself, which moedge cannot do for it")
    asked = {name for name, value in features.items() if value is not None}
    if unknown := asked - _HONOURED - _HARMLESS:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {sorted(unknown)}, which moedge does not know"
        )
    window = features.get("sliding_window") if attention_mask is None else attention_mask.window
    # One family means "no window" by 0.
    window = window or None
    chunked = _is_chunked(module)
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=None if chunked else window,
        chunk=window if chunked else None,
        softcap=features.get("softcap"),
        sinks=features.get("s_aux"),
        latent=latent_weights(module),
        index=index,
    )
    if rescale := getattr(module, RESCALE, None):
        query = rescale(query, packed.positions)
    count = packed.batch.num_tokens
    padding = query.shape[2] - count
    q, k, v = (x[0].transpose(0, 1)[:count] if padding else x[0].transpose(0, 1) for x in (query, key, value))
    if call.latent is not None:
        out = packed.attention.attend(call, q, k, v, packed.batch)
    else:
        width = max(query.shape[-1], value.shape[-1])
        q, k, v = (_widen(x, width) for x in (q, k, v))
        out = packed.attention.attend(call, q, k, v, packed.batch)[..., : value.shape[-1]]
    return (F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out).unsqueeze(0), None


def _is_chunked(module: torch.nn.Module) -> bool:
    """Whether a layer attends from the start of its chunk on: the mask's size alone does not show it."""
    kinds = getattr(module.config, "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] == "chunked_attention"


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pads heads [..., D] with zeros to `width`, where keys and values differ in D: the cache has one length."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
