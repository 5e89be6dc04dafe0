"""Latent attention (MLA): hands latents to the attention function before transformers' modules expand them.

transformers' own caches store the same: `expand_kv` is called after the cache was updated.

Sparse attention (DeepSeek-AI, DeepSeek-V3.2, 2025) is latent attention with an indexer that chooses `index_topk` tokens
for each token. Indexers mix tokens, so their `forward` ends here before it does, and attention goes on from there.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.protocol import IndexQuery, LatentWeights
from ..settings.errors import UnsupportedModel
from ..shape.config import ModelConfig


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
    for module in modules:
        module.expand_kv = _as_they_are
        if (indexer := getattr(module, "indexer", None)) is not None:
            indexer.forward = partial(_index, indexer, _rotation_of(indexer))


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


def _rotation_of(indexer: Any) -> Any:
    """The function that an indexer's `forward` rotates with: families rotate pairs of elements, or of halves.

    Raises UnsupportedModel for an indexer of another make.
    """
    code = inspect.unwrap(type(indexer).forward).__code__
    found = [name for name in code.co_names if name.startswith("apply_rotary_pos_emb")]
    if len(found) != 1 or not {"wq_b", "wk", "k_norm", "weights_proj", "softmax_scale", "relu"} <= set(code.co_names):
        raise UnsupportedModel(f"{type(indexer).__name__} chooses tokens in a way that moedge does not know")
    return getattr(sys.modules[type(indexer).__module__], found[0])


def _as_they_are(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotated


def latent_weights(module: Any) -> LatentWeights | None:
    """The matrix of `kv_b_proj`, which is never quantized, by head; None for other kinds of attention."""
    if not hasattr(module, "expand_kv"):
        return None
    (matrix,) = module.kv_b_proj.packed.planes
    return LatentWeights(matrix.view(module.num_heads, -1, module.kv_lora_rank), module.qk_nope_head_dim)
