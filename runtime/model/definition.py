"""Instantiates transformers' own model class on the meta device, with moedge's attention and experts plugged in."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..shape.config import ModelConfig
from .attention_seam import register_attention
from .experts_seam import register_experts

SEAM = "moedge"


def define(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, buffers real. No code but transformers' runs."""
    register_attention(SEAM)
    register_experts(SEAM)
    config_class = CONFIG_MAPPING[config.family.model_type]
    values = {name: value for name, value in config.values.items() if name not in _OWN_CHOICE}
    model_config = config_class(**values)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(
            model_config, dtype=dtype, attn_implementation=SEAM, experts_implementation=SEAM
        )
    return model.eval()


# What the file may say but moedge decides.
_OWN_CHOICE = {"dtype", "torch_dtype", "architectures", "use_cache", "_name_or_path"}
