"""GGUF files: their model's configuration as a config.json would have it. Torch-free.

Keys are those of llama.cpp's converter (gguf.constants.Keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...offload.checkpoint.header import TensorEntry, described
from ..settings.errors import UnsupportedModel
from .gguf_architectures import ARCHITECTURES, Architecture
from .gguf_metadata import File, Values, ending_tokens, rope_parameters
from .quantized import ReadSmall

_TOKENS = {"bos": "bos", "pad": "padding"}


def gguf_config(
    metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], read: ReadSmall | None = None
) -> dict[str, Any]:
    """What config.json would say of the model; `read` gives the bytes of a small tensor.

    Raises UnsupportedModel for an architecture that is not read, and for what its family cannot express.
    """
    file = File(metadata, entries, read)
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedModel(
            f"GGUF: architecture {described(file.architecture)} is not read; wanted one of {', '.join(ARCHITECTURES)}, "
            "or the checkpoint that the file was made from"
        )
    values = _common(file, architecture)
    fields = {"num_key_value_heads": _kv_heads, **architecture.fields}
    values |= {name: file.get(key) if isinstance(key, str) else key(file) for name, key in fields.items()}
    values |= architecture.published
    if architecture.own is not None:
        values |= architecture.own(file, values)
    # Tokens that a file does not have are none; a family's defaults are those of another vocabulary.
    nulls = (*architecture.nulls, *(f"{name}_token_id" for name in _TOKENS))
    return {name: value for name, value in values.items() if value is not None or name in nulls}


def _common(file: File, architecture: Architecture) -> Values:
    embedding = file.entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel("GGUF: the file has no matrix token_embd.weight; it is not the file of a whole model")
    heads, hidden = file.size("attention.head_count"), file.size("embedding_length")
    width = file.get("attention.key_length")
    if file.get("attention.value_length", width) != width and "v_head_dim" not in architecture.fields:
        raise UnsupportedModel("GGUF: keys and values are of different lengths, which is not read")
    width = file.size("attention.key_length", hidden // heads if heads else 0) or None
    tokens = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    return {
        "model_type": architecture.family,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "num_nextn_predict_layers": file.predicting or None,
        "num_attention_heads": heads,
        "head_dim": width,
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "rope_parameters": rope_parameters(file, width, architecture.partial),
        **tokens,
        "eos_token_id": ending_tokens(file.metadata),
    }


def _kv_heads(file: File) -> Any:
    """The heads of layers that have keys; of others a list says 0."""
    return file.only("attention.head_count_kv", file.get("attention.head_count"))
