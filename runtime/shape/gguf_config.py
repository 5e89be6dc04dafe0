"""The configuration of a GGUF file's model, as a config.json of transformers would have it. Torch-free.

Keys are those of llama.cpp's converter (gguf.constants.Keys); sizes that tensors show are taken from the tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ...offload.checkpoint.header import TensorEntry, described
from ..settings.errors import UnsupportedModel
from .quantized import ReadSmall

_Values = dict[str, Any]
# The architectures that are read, by the name that llama.cpp has for them.
ARCHITECTURES = ("gemma2", "gemma3", "gpt-oss", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_FREQUENCIES = "rope_freqs.weight"
_MAX_FREQUENCIES = 1024
# Of Llama 3.1 and later; its converter writes what comes of them, and not the numbers (convert_hf_to_gguf.py).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _File:
    """The metadata of one architecture, and the shapes of tensors."""

    def __init__(
        self, metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], read: ReadSmall | None = None
    ) -> None:
        self.metadata = metadata
        self.entries = entries
        self.read = read
        self.architecture = str(metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; one value where a list has the same for all layers."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedModel(f"GGUF: {self.architecture}.{key} is {value}")
        return value

    def size(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int:
            raise UnsupportedModel(f"GGUF: {self.architecture}.{key} is {described(value)}, wanted a number")
        return value

    def rows(self, part: str) -> int | None:
        """The outputs of a matrix of the first layer that has it."""
        found = (entry for name, entry in self.entries.items() if name.endswith(f".{part}.weight"))
        entry = next(found, None)
        return entry.shape[-2] if entry is not None and len(entry.shape) > 1 else None


def gguf_config(
    metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], read: ReadSmall | None = None
) -> dict[str, Any]:
    """What config.json would say of the model; `read` gives the bytes of a small tensor.

    Raises UnsupportedModel for an architecture that is not read, and for what its family cannot express.
    """
    file = _File(metadata, entries, read)
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF: architecture {described(file.architecture)} is not read; wanted one of {', '.join(ARCHITECTURES)}, "
            "or the checkpoint that the file was made from"
        )
    values = _common(file)
    if (of_family := _OWN.get(file.architecture)) is not None:
        values |= of_family(file, values)
    return {name: value for name, value in values.items() if value is not None}


def _common(file: _File) -> _Values:
    embedding = file.entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedModel("GGUF: the file has no matrix token_embd.weight; it is not the file of a whole model")
    heads, hidden = file.size("attention.head_count"), file.size("embedding_length")
    width = file.get("attention.key_length")
    if file.get("attention.value_length", width) != width:
        raise UnsupportedModel("GGUF: keys and values are of different lengths, which is not read")
    tokens = {f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    return {
        "model_type": _FAMILIES.get(file.architecture, file.architecture),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": width if width is not None else hidden // heads if heads else None,
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "rope_parameters": {"rope_theta": file.get("rope.freq_base", 10_000.0), **_scaling(file)},
        **tokens,
        "eos_token_id": _ends(file.metadata),
    }


_TOKENS = {"bos": "bos", "pad": "padding"}
_FAMILIES = {
    "gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip


def _ends(metadata: Mapping[str, Any]) -> list[Any] | None:
    """The tokens that end an answer: of the text, of a turn, of a message. Raises UnsupportedModel."""
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    for name, token in found.items():
        if token is not None and type(token) is not int:
            raise UnsupportedModel(f"GGUF: tokenizer.ggml.{name}_token_id is {described(token)}, wanted a number")
    return list(dict.fromkeys(token for token in found.values() if token is not None)) or None


def _scaling(file: _File) -> _Values:
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor", 1.0)
    if _FREQUENCIES in file.entries:
        return _llama3(file)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"GGUF: rotary positions are scaled by {described(kind)}, wanted linear or yarn")
    given = {
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        "beta_fast": file.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": "yarn", "factor": factor, **{name: value for name, value in given.items() if value}}


def _llama3(file: _File) -> _Values:
    """The scaling whose factors by frequency are those of the file."""
    entry = file.entries[_FREQUENCIES]
    if file.read is None or entry.dtype != "F32" or entry.numel > _MAX_FREQUENCIES:
        raise UnsupportedModel(f"GGUF: {_FREQUENCIES} is {entry.dtype} {list(entry.shape)}, wanted few F32")
    found = struct.unpack(f"<{entry.numel}f", file.read(_FREQUENCIES))
    scaling = {**_LLAMA3, "factor": float(f"{max(found):.4g}")}
    wanted = _factors(float(file.get("rope.freq_base", 10_000.0)), entry.numel, scaling)
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, wanted, strict=True)):
        raise UnsupportedModel(f"GGUF: {_FREQUENCIES} is not the scaling of Llama 3, which alone is read")
    return {"rope_type": "llama3", **scaling}


def _factors(theta: float, count: int, scaling: Mapping[str, float]) -> list[float]:
    """What each frequency is divided by (transformers' `_compute_llama3_parameters`)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(count):
        turns = scaling["original_max_position_embeddings"] * theta ** (-index / count) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


def _llama(file: _File, values: _Values) -> _Values:
    """Mixtral is a llama with experts here. Which matrices have biases, tensors alone say."""
    if not file.get("expert_count"):
        return {
            "attention_bias": _biased(file, ("attn_q", "attn_k", "attn_v", "attn_output")),
            "mlp_bias": _biased(file, ("ffn_gate", "ffn_up", "ffn_down")),
        }
    return {
        "model_type": "mixtral",
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
    }


def _biased(file: _File, parts: tuple[str, ...]) -> bool:
    """Whether matrices have biases. Raises UnsupportedModel where only some of them do."""
    found = [part for part in parts if f"blk.0.{part}.bias" in file.entries]
    if found and len(found) < len(parts):
        raise UnsupportedModel(f"GGUF: of {', '.join(parts)} only {', '.join(found)} have biases; wanted all or none")
    return bool(found)


def _qwen_moe(file: _File, values: _Values) -> _Values:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.rows("ffn_up_exps"),
        "shared_expert_intermediate_size": file.rows("ffn_up_shexp"),
        # Absent where all layers have experts, and of no use then.
        "intermediate_size": values["intermediate_size"] or file.rows("ffn_up_exps"),
        # Qwen3 divides the scores of chosen experts by their sum, Qwen2 does not; the file says nothing of it.
        "norm_topk_prob": file.architecture == "qwen3moe",
    }


def _gpt_oss(file: _File, values: _Values) -> _Values:
    rope = values["rope_parameters"]
    # As published: the file's keys leave these out.
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    return {
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "intermediate_size": file.rows("ffn_up_exps"),
        "sliding_window": file.get("attention.sliding_window"),
        "rope_parameters": {**usual, **rope},
    }


def _gemma(file: _File, values: _Values) -> _Values:
    # Models of these numbers of layers scale queries by the hidden size (llama.cpp, LLM_TYPE_27B).
    wide = file.size("block_count") == {"gemma2": 46, "gemma3": 62}[file.architecture]
    heads = values["num_attention_heads"]
    return {
        "query_pre_attn_scalar": values["hidden_size"] // heads if wide and heads else values["head_dim"],
        "sliding_window": file.get("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(file: _File, values: _Values) -> _Values:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**_gemma(file, values), **{name: file.get(name) for name in caps}}


def _gemma3(file: _File, values: _Values) -> _Values:
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10_000.0)}
    everywhere = {**values["rope_parameters"], "rope_theta": file.get("rope.freq_base", 1_000_000.0)}
    rope = {"full_attention": everywhere, "sliding_attention": local}
    return {**_gemma(file, values), "rope_parameters": rope}


_OWN: Mapping[str, Callable[[_File, _Values], _Values]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "llama": _llama,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
}
