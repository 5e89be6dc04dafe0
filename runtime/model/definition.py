"""Instantiates transformers' own model class on the meta device, with moedge's attention and experts plugged in."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ..settings.errors import UnsupportedModel
from ..shape.config import ModelConfig
from . import llama4
from .attention_seam import hand_on_passes, register_attention
from .experts_seam import adapt_identity_experts, drop_identity_matrices, register_experts
from .latent_seam import keep_latents
from .recurrent.lightning import shed_decays

SEAM = "moedge"


def define(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, real buffers. Runs transformers' code alone.

    Raises UnsupportedModel where transformers refuses the configuration.
    """
    register_attention(SEAM)
    register_experts(SEAM)
    model = _build(config, dtype, SEAM)
    llama4.adapt(model)
    adapt_identity_experts(model)
    keep_latents(model, config)
    shed_decays(model)
    hand_on_passes(model)
    return model.eval()


def define_stock(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The same without a seam: attention and experts are transformers' own."""
    model = _build(config, dtype, "eager")
    llama4.adapt_decoder(model)
    return model.eval()


def stock_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor that a checkpoint of the config's family holds, as transformers writes it.

    No memory is taken. Raises UnsupportedModel where transformers refuses the configuration.
    """
    model = define_stock(config, torch.bfloat16)
    written = revert_weight_conversion(model, model.state_dict())
    if config.get("tie_word_embeddings"):
        written.pop("lm_head.weight", None)
    return {name: tuple(tensor.shape) for name, tensor in written.items()}


def _build(config: ModelConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    config_class = CONFIG_MAPPING[config.family.model_type]
    values = {name: value for name, value in config.values.items() if name not in _OWN_CHOICE}
    if implementation == SEAM:
        values |= _SMALLEST_BUFFERS.get(config.family.model_type, {})
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]._from_config(
                config_class(**values),
                dtype=dtype,
                attn_implementation=implementation,
                experts_implementation=implementation,
            )
    except (StrictDataclassError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Each class checks its config in its own way, and some sizes only fail in its own code.
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"config.json: transformers cannot build a model from it ({reason})") from None
    drop_identity_matrices(model)
    return model


# Fields of the file that moedge decides itself.
_OWN_CHOICE = {"dtype", "torch_dtype", "architectures", "use_cache", "_name_or_path"}
# Of lightning attention: as many tokens squared for every head, which are shed at once.
_SMALLEST_BUFFERS = {"minimax": {"block_size": 1}}
