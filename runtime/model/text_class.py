"""The class of transformers that computes a family, and one for families that it has only inside models that also see.

Those have a text model there (`*TextModel`), and the whole model's class puts a head on it: so does the class here.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from ..settings.errors import UnsupportedModel
from ..shape.families import CONVERTED_AS, TEXT_AND_PICTURES


def text_class(config_class: Any) -> Any:
    """The class of a model that predicts text from text alone."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if config_class in mapping:
            found = mapping[config_class]
            if config_class.model_type in CONVERTED_AS:
                _convert_text(found.__name__, config_class.model_type)
            return found
    return _headed(config_class)


@cache
def _headed(configuration: Any) -> type[PreTrainedModel]:
    module = import_module(configuration.__module__.replace(".configuration_", ".modeling_"))
    usual = configuration.__name__.removesuffix("Config") + "Model"
    body: Any = getattr(module, _NAMED_OTHERWISE.get(configuration.model_type, usual), None)
    if body is None:
        raise UnsupportedModel(
            f"this release of transformers has no text model of {configuration.model_type!r}: a newer one is wanted"
        )

    class TextWithHead(body.__mro__[1]):  # type: ignore[misc]
        """The text model under an output head; its parameters have the names that all text models have."""

        config_class = configuration
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body(config)
            leave_text_experts(self.model)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **others: Any
        ) -> CausalLMOutput:
            hidden = self.model(input_ids, **others).last_hidden_state
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            return CausalLMOutput(logits=_scaled(self.config, self.lm_head(hidden[:, kept])))

    TextWithHead.__name__ = f"{body.__name__}WithHead"
    _convert_text(TextWithHead.__name__, configuration.model_type)
    return TextWithHead


@cache
def _convert_text(name: str, model_type: str) -> None:
    """Tells transformers how tensors of files become parameters of the class of that name."""
    conversion = get_checkpoint_conversion_mapping(CONVERTED_AS.get(model_type)) or []
    own = [
        each
        for each in conversion
        if not any("language_model" in pattern for pattern in (*each.source_patterns, *each.target_patterns))
    ]
    if model_type == TEXT_AND_PICTURES:
        # Its files have routers as [in, out].
        own.append(WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Transpose(0, 1)]))
    register_checkpoint_conversion_mapping(name, own, overwrite=True)


_NAMED_OTHERWISE = {
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
}


def leave_text_experts(model: nn.Module) -> None:
    """Takes the experts for pictures out of mixtures that have some beside those for text, whose names become those of
    other families. The mixture's `forward` stays, which calls `text_moe` where no token is a picture's."""
    block: Any
    for block in [each for each in model.modules() if hasattr(each, "text_moe")]:
        text = block.text_moe
        del block.text_moe, block.vision_moe
        block.gate, block.experts, block.hidden_dim = text.gate, text.experts, text.hidden_dim
        block.text_moe = partial(type(text).forward, block)


def _scaled(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """What the classes of whole models do to logits, where their text model's configuration asks for it."""
    logits = logits * getattr(config, "output_multiplier", 1) / getattr(config, "logits_scaling", 1)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
