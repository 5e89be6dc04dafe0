"""Tiny random checkpoints of whole models that also see or hear, around the tiny text model of a family.

Other parts are made on the meta device in the size of their classes' defaults, and each of their parameters is replaced
by one number: no test computes with them. Names and the forward are those of transformers' class for the whole model.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moedge.runtime.model.text_class import text_class
from moedge.runtime.shape.families import WRAPPERS
from support.tiny_families import build_model, build_tokenizer

# What a whole configuration needs to be valid beside a text model of 64 elements.
OTHERS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config": {"codebook_size": 32}, "audio_config": {"codebook_size": 32},
        "image_token_offset": 320, "audio_token_offset": 352,
    },
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "fast_vlm": {"vision_config": {"model_type": "clip_vision_model"}},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}, "pad_token_id": 0},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "perception_lm": {"vision_config": {"model_type": "clip_vision_model", "model_args": {"embed_dim": 8}}},
    "gemma4": {"audio_config": None},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
}  # fmt: skip


def whole_model(family: str) -> str | None:
    """The whole model's type whose class computes a family; None for those that transformers has a class for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if text_class(CONFIG_MAPPING[family]).__module__.startswith("transformers."):
        return None
    return next(model_type for model_type, text in WRAPPERS.items() if text == family)


def build_multimodal(model_type: str, text: str | None = None, **sizes: Any) -> Any:
    """The stock whole model, of which only the text model and the output head can compute; `text` as in WRAPPERS."""
    from accelerate import init_empty_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    inner = build_model(text or WRAPPERS[model_type], **sizes)
    config = CONFIG_MAPPING[model_type](
        text_config=inner.config.to_dict(),
        tie_word_embeddings=getattr(inner.config, "tie_word_embeddings", False),
        **OTHERS.get(model_type, {}),
    )
    with init_empty_weights(include_buffers=False):
        model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).float().eval()
    _fill(_decoder(model), inner.get_decoder().state_dict())
    head = inner.get_input_embeddings() if config.tie_word_embeddings else inner.get_output_embeddings()
    _head(model).weight = head.weight
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.zeros([1] * parameter.dim())))
    return model


def _fill(decoder: Any, state: dict[str, Any]) -> None:
    """Gives a whole model's text model the parameters of the tiny one, and experts for pictures any."""
    for name in [name for name, _ in decoder.named_parameters() if ".text_moe." in name]:
        state[name] = state.pop(name.replace(".text_moe.", "."))
    for name, parameter in decoder.named_parameters():
        if ".vision_moe." in name:
            state[name] = torch.randn(parameter.shape)
    decoder.load_state_dict(state, assign=True)


def _decoder(model: Any) -> Any:
    """The text model without its head, which some whole models have inside of it."""
    found = model.get_decoder()
    return found if hasattr(found, "layers") else found.get_decoder()


def _head(model: Any) -> Any:
    return model.get_output_embeddings() or model.get_decoder().get_output_embeddings()


def save_multimodal(model_type: str, folder: Path, text: str | None = None, **sizes: Any) -> Any:
    """Writes the checkpoint of such a model, a tokenizer beside it; returns the whole model.

    In the file are the text model, the head, and the weight of one norm of another part.
    """
    model = build_multimodal(model_type, text, **sizes)
    own = {id(parameter) for parameter in (*_decoder(model).parameters(), _head(model).weight)}
    state = model.state_dict(keep_vars=True)
    buffers = {name for name, _ in model.named_buffers()}
    inside = next(name for name, module in model.named_modules() if module is _decoder(model))
    kept = {name: each for name, each in state.items() if id(each) in own or name.startswith(f"{inside}.")}
    others = [name for name in state if name not in kept and name not in buffers and name.endswith("norm.weight")]
    model.save_pretrained(folder, state_dict=kept | {name: state[name] for name in others[:1]})
    if model_type in _MISNAMED:
        _rename(folder / "model.safetensors", _MISNAMED[model_type], "language_model.model.layers.")
    build_tokenizer(folder, model.config.get_text_config(decoder=True).vocab_size)
    return model


_MISNAMED = {"kimi_k25": "language_model.model.blocks.", "qianfan_ocr": "language_model.model.encoder.layers."}


def _rename(path: Path, found: str, wanted: str) -> None:
    """Gives tensors the names of published files, where transformers takes the text model's layers for a tower's."""
    tensors = load_file(path)
    save_file({name.replace(found, wanted): each for name, each in tensors.items()}, path, {"format": "pt"})
