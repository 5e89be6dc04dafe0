"""Seam 1: transformers calls this function instead of its own attention; the pass is a keyword of `model(...)`.

Latent attention (MLA) hands latents to it before transformers' modules expand them; transformers' own caches store the
same: `expand_kv` is called after the cache was updated. Sparse attention (DeepSeek-AI, DeepSeek-V3.2, 2025) is latent
attention with an indexer that chooses `index_topk` tokens for each token. Indexers mix tokens, so their `forward` ends
here before it does, and attention goes on from there. Those of MiniMax-M3 choose blocks, beside ordinary attention.
"""

from __future__ import annotations

import dis
import inspect
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention.protocol import AttentionBackend, AttentionCall, BlockQuery, IndexQuery, LatentWeights, TokenBlocks
from ..engine.sequence import Batch
from ..settings.errors import UnsupportedModel
from ..shape.config import TWO_CALLS, ModelConfig
from .experts_seam import RESCALE


def keep_latents(model: nn.Module, config: ModelConfig) -> None:
    """Replaces `expand_kv` of every attention module, and `forward` of indexers; their parameters and names stay.

    Raises UnsupportedModel where the family's modules have none.
    """
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if config.is_latent and not modules:
        raise UnsupportedModel(
            f"this release of transformers caches what it expands from the latents of {config.family.model_type}; "
            "a newer one is wanted, which caches latents"
        )
    for module in model.modules():
        if hasattr(module, "compress_ratio"):
            module.forward = partial(_block_index, module, _rotation_of(module, _BLOCK_INDEXER), _rotary_of(model))
    for module in modules:
        module.expand_kv = lambda latents, rotated: (latents, rotated)
        if (indexer := getattr(module, "indexer", None)) is not None:
            indexer.forward = partial(_index, indexer, _rotation_of(indexer, _INDEXER))


def keep_index_keys(model: nn.Module) -> None:
    """Replaces `forward` of indexers that choose blocks (MiniMax-M3); their parameters and names stay."""
    for module in model.modules():
        indexer: Any = getattr(module, "indexer", None)
        if hasattr(indexer, "build_block_mask"):
            indexer.forward = partial(
                _index_blocks, indexer, sys.modules[type(indexer).__module__].apply_rotary_pos_emb
            )


def _index_blocks(
    indexer: Any, rotate: Any, hidden: torch.Tensor, positions: Any, *args: Any, **kwargs: Any
) -> BlockQuery:
    """Projections, norms and rotation of an indexer that chooses blocks, without scores.

    Modules give what it returns to the attention function as `block_indices`.
    """
    q = indexer.q_norm(indexer.q_proj(hidden).unflatten(-1, (indexer.num_heads, -1)))
    k = indexer.k_norm(indexer.k_proj(hidden).unsqueeze(2))
    q, k = rotate(q, k, *(each[..., : indexer.head_dim] for each in positions), unsqueeze_dim=2)
    sizes = (indexer.block_size, indexer.topk_blocks, indexer.local_blocks)
    return BlockQuery(int(indexer.layer_idx), q[0], k[0], *map(int, sizes))


def _index(
    indexer: Any, rotate: Any, hidden: torch.Tensor, queries: torch.Tensor, positions: Any, *args: Any, **kwargs: Any
) -> IndexQuery:
    """Replaces `forward` of an indexer: its projections, norm and rotation, without scores.

    Modules give what it returns to the attention function as `indices`, and to layers that share their choice.
    """
    heads, rotated = indexer.n_heads, indexer.qk_rope_head_dim
    q = indexer.wq_b(queries).unflatten(-1, (heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rotated, k_rotated = rotate(q[..., :rotated], k[..., :rotated], *positions, unsqueeze_dim=2)
    q, k = (torch.cat([each, x[..., rotated:]], -1)[0] for each, x in ((q_rotated, q), (k_rotated, k)))
    # The scale of products is positive, and so it may be one of their weights.
    weights = indexer.weights_proj(hidden).float()[0] * (heads**-0.5 * indexer.softmax_scale)
    return IndexQuery(int(indexer.layer_idx), q, k, weights, int(indexer.index_topk))


def _block_index(
    indexer: Any, rotate: Any, rotary: Any, hidden: torch.Tensor, positions: Any, *args: Any, **kwargs: Any
) -> IndexQuery:
    """Replaces `forward` of an indexer of blocks of tokens; modules combine what it returns with the mask."""
    size, dim = int(indexer.compress_ratio), int(indexer.index_head_dim)

    def keys_of(tokens: torch.Tensor) -> torch.Tensor:
        means = tokens.view(-1, size, dim).float().mean(1).to(tokens.dtype)
        starts = torch.arange(0, len(tokens), size, device=tokens.device).expand(3, 1, -1)
        cos, sin = rotary(means, starts)
        rotated: torch.Tensor = rotate(indexer.k_layernorm(means)[None, :, None], cos=cos, sin=sin, unsqueeze_dim=2)
        return rotated.flatten(0, -2)

    q, k = indexer.index_qk_proj(hidden).split([indexer.index_n_heads * dim, dim], -1)
    q = indexer.q_layernorm(q.unflatten(-1, (-1, dim)))
    q = rotate(q, cos=positions[0], sin=positions[1], unsqueeze_dim=2)[0]
    blocks = TokenBlocks(size, int(indexer.block_topk), keys_of)
    # What is chosen depends on the order of scores alone.
    weights = torch.ones(q.shape[:2], device=q.device)
    count = blocks.most * size + size - 1
    return IndexQuery(int(indexer.layer_idx), q, k.transpose(0, 1), weights, count, blocks)


def _rotary_of(model: Any) -> Any:
    return model.get_decoder().rotary_emb


_INDEXER = {"wq_b", "wk", "k_norm", "weights_proj", "softmax_scale", "relu"}
_BLOCK_INDEXER = {"index_qk_proj", "q_layernorm", "k_layernorm", "mean", "block_topk", "relu"}


def _rotation_of(indexer: Any, known: set[str]) -> Any:
    """The function that an indexer's `forward` rotates with: families rotate pairs of elements, or of halves.

    Raises UnsupportedModel for an indexer of another make.
    """
    code = inspect.unwrap(type(indexer).forward).__code__
    found = [name for name in code.co_names if name.startswith("apply_rotary_pos_emb")]
    if len(found) != 1 or not known <= set(code.co_names):
        raise UnsupportedModel(f"{type(indexer).__name__} chooses tokens in a way that moedge does not know")
    return getattr(sys.modules[type(indexer).__module__], found[0])


def latent_weights(module: Any) -> LatentWeights | None:
    """The matrix of `kv_b_proj`, which is never quantized, by head; None for other kinds of attention."""
    if not hasattr(module, "expand_kv"):
        return None
    (matrix,) = module.kv_b_proj.packed.planes
    return LatentWeights(matrix.view(module.num_heads, -1, module.kv_lora_rank), module.qk_nope_head_dim)


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
    """Passed instead of a mask tensor: the number of tokens that a layer looks back, None for all.

    Modules whose indexer chooses blocks of tokens combine it with the `index` that they get, as with masks of booleans.
    """

    window: int | None
    index: IndexQuery | None = None
    dtype: ClassVar[torch.dtype] = torch.bool

    def __and__(self, index: IndexQuery) -> Self:
        return replace(self, index=index)

    def __getitem__(self, part: Any) -> Self:
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


def count_calls(model: nn.Module, config: ModelConfig) -> None:
    """Numbers the calls of modules that attend twice: each has keys and values of its own in the cache."""
    if config.family.model_type not in TWO_CALLS:
        return
    for module in model.modules():
        if hasattr(module, "lambda_q1"):
            module.register_forward_pre_hook(_begin_calls)


def _begin_calls(module: Any, args: Any) -> None:
    module.calls = iter((2 * module.layer_idx, 2 * module.layer_idx + 1))


def number_uses(model: nn.Module) -> None:
    """Lets the attention of blocks that layers share know for which layer it is called."""
    for module in model.modules():
        if hasattr(module, "num_fwd_mem_blocks") and hasattr(module, "is_causal"):
            module.register_forward_pre_hook(_take_layer, with_kwargs=True)


def _take_layer(attention: Any, args: Any, arguments: dict[str, Any]) -> None:
    attention.layer_idx = arguments["layer_idx"]


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
    index = features.pop("indices", attention_mask and attention_mask.index)
    blocks = features.pop("block_indices", None)
    if not (isinstance(index, IndexQuery | None) and isinstance(blocks, BlockQuery | None)):
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
    calls: Any = getattr(module, "calls", None)
    call = AttentionCall(
        layer=int(module.layer_idx) if calls is None else next(calls),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=None if chunked else window,
        chunk=window if chunked else None,
        softcap=features.get("softcap"),
        sinks=features.get("s_aux"),
        latent=latent_weights(module),
        index=index,
        blocks=blocks,
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
        # Pads heads [..., D] with zeros to `width`, where keys and values differ in D: the cache has one length.
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        out = packed.attention.attend(call, q, k, v, packed.batch)[..., : value.shape[-1]]
    return (F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out).unsqueeze(0), None


def _is_chunked(module: torch.nn.Module) -> bool:
    """Whether a layer attends from the start of its chunk on: the mask's size alone does not show it."""
    kinds = getattr(module.config, "layer_types", None)
    return kinds is not None and kinds[module.layer_idx] == "chunked_attention"
