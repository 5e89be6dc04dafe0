"""Latent attention (MLA): hands latents to the attention function before transformers' modules expand them.

transformers' own caches store the same: `expand_kv` is called after the cache was updated.

Sparse attention (DeepSeek-AI, DeepSeek-V3.2, 2025) is latent attention with an indexer that chooses `index_topk` tokens
for each token. No sequence is longer here (`ModelConfig.context`), so its choice is known without computing it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention.protocol import LatentWeights
from ..engine.batch import Batch
from ..settings.errors import UnsupportedModel
from ..shape.config import ModelConfig


def keep_latents(model: nn.Module, config: ModelConfig) -> None:
    """Replaces `expand_kv` of every attention module; their parameters and names stay.

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
        if hasattr(module, "indexer"):
            module.indexer = EveryToken(int(module.config.index_topk))


class EveryToken(nn.Module):
    """Replaces an indexer; modules give what it returns to the attention function as `indices`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def check(self, batch: Batch) -> None:
        """Raises UnsupportedModel where an indexer would leave tokens out."""
        longest = max(chunk.past + chunk.count for chunk in batch.chunks)
        if longest > self._limit:
            raise UnsupportedModel(
                f"a sequence has {longest} tokens, of which this model's indexer chooses {self._limit} (index_topk); "
                "moedge does not compute its choice: give it shorter rows"
            )

    def forward(self, *args: Any, **kwargs: Any) -> EveryToken:
        return self


def _as_they_are(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotated


def latent_weights(module: Any) -> LatentWeights | None:
    """The matrix of `kv_b_proj`, which is never quantized, by head; None for other kinds of attention."""
    if not hasattr(module, "expand_kv"):
        return None
    (matrix,) = module.kv_b_proj.packed.planes
    return LatentWeights(matrix.view(module.num_heads, -1, module.kv_lora_rank), module.qk_nope_head_dim)
