"""GGUF files: their model's configuration as a config.json would have it, and the tensors of its weights. Torch-free.

Keys are those of llama.cpp's converter (gguf.constants.Keys), names those of gguf.constants.TENSOR_NAMES; sizes that
tensors show are taken from the tensors. Stacked experts become one weight each, so that they are read one by one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import DTYPES, FORMATS, OPTION_DTYPES
from ..settings.errors import UnsupportedModel
from .config import ModelConfig
from .quantization import WHOLE
from .quantized import ModelTensors, QuantizedWeight, ReadSmall

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


# Floats, by the dtype of safetensors, and blocks of codes that gguf.quants dequantizes.
FLOATS = ("F32", "F16", "BF16")
BLOCKS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
# The weight formats that have the codes and scales of blocks as they are.
_KEPT = {"Q8_0": "int8-g32-f16", "Q4_0": "int4-g32-f16", "Q4_K": "q4_k", "MXFP4": "mxfp4-e8m0"}
_OPTIONS = {each.safetensors: name for name, each in OPTION_DTYPES.items()}
# What weights of blocks are counted as, and computed from.
_WIDENED = DTYPES["bfloat16"]
# Rotary factors are part of the configuration.
_COMPUTED = ("rope_freqs.weight",)


@dataclass(frozen=True, slots=True)
class GgufWeight(QuantizedWeight):
    """A weight of a GGUF file; `numbers` is the type of its blocks, and `bits` is 0 where it holds floats.

    `sources` are the tensors whose rows make it up by turns, `expert` the slice of stacked ones that it is. Rows of
    `heads` heads lie in the order of llama.cpp's rotary positions; 0 says that they lie as in transformers. `added`
    is the number that is added to what lies in the file.
    """

    sources: tuple[str, ...] = ()
    expert: int | None = None
    heads: int = 0
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class _Naming:
    """`layer` has the parts of a layer's names, `experts` those of stacked experts, with E for their index."""

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norms_less_one: bool = False


_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_DENSE = {**_ATTENTION, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROUTED = {f"ffn_{name}_exps": f"mlp.experts.E.{name}_proj" for name in ("gate", "up", "down")}
_SHARED = {
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA = {
    **_DENSE, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_MIXTRAL = {f"ffn_{name}_exps": f"block_sparse_moe.experts.E.{own}" for name, own in zip(
    ("gate", "down", "up"), ("w1", "w2", "w3"), strict=True)}  # fmt: skip
_NAMINGS: Mapping[str, _Naming] = {
    "gemma2": _Naming(_GEMMA, norms_less_one=True),
    "gemma3_text": _Naming(_GEMMA, norms_less_one=True),
    "gpt_oss": _Naming(
        {**_ATTENTION, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
         "attn_sinks": "self_attn.sinks"},
    ),
    "llama": _Naming(_DENSE, permuted=True),
    "mixtral": _Naming({**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"}, _MIXTRAL, permuted=True),
    "qwen2": _Naming(_DENSE),
    "qwen2_moe": _Naming({**_ATTENTION, **_SHARED, "ffn_gate_inp": "mlp.gate"}, _ROUTED),
    "qwen3": _Naming(_DENSE),
    "qwen3_moe": _Naming({**_DENSE, "ffn_gate_inp": "mlp.gate"}, _ROUTED),
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")


def gguf_tensors(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> ModelTensors:
    """The weights of the config's model. Raises BadCheckpoint for tensors that it does not have."""
    weights: dict[str, QuantizedWeight] = {}
    for weight in _weights(config, entries):
        if weights.setdefault(weight.entry.name, weight) is not weight:
            raise BadCheckpoint(f"{described(weight.entry.name)} is in the file twice, under two names")
    return ModelTensors({name: weight.entry for name, weight in weights.items()}, weights)


def _weights(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> Iterator[GgufWeight]:
    for name, entry in entries.items():
        if entry.dtype not in (*FLOATS, *BLOCKS):
            raise BadCheckpoint(
                f"{described(entry.name)} is {entry.dtype}, wanted one of {', '.join((*FLOATS, *BLOCKS))}"
            )
        if name in _COMPUTED:
            continue
        match = _LAYER.fullmatch(name)
        part, _, kind = (match[2] if match else name).rpartition(".")
        if kind not in ("weight", "bias"):
            raise _unknown(name, config)
        if match is None:
            if part not in _OUTSIDE:
                raise _unknown(name, config)
            less_one = part == "output_norm" and _NAMINGS[config.family.model_type].norms_less_one
            weight = _weight(f"{_OUTSIDE[part]}.{kind}", (entry,), entry.shape, added=-1.0 if less_one else 0.0)
            # Embedding and head are floats in memory.
            yield replace(weight, kept="")
        elif config.family.model_type == "gpt_oss" and part.startswith("ffn_") and part.endswith("_exps"):
            yield from _pairs(config, entries, f"blk.{match[1]}", int(match[1]), (part, kind))
        else:
            yield from _of_layer(config, entry, int(match[1]), part, kind)


def _of_layer(config: ModelConfig, entry: TensorEntry, layer: int, part: str, kind: str) -> Iterator[GgufWeight]:
    naming, prefix = _NAMINGS[config.family.model_type], f"model.layers.{layer}"
    if part in naming.experts and kind == "weight":
        if len(entry.shape) != 3 or entry.shape[0] != config.num_experts:
            raise BadCheckpoint(
                f"{described(entry.name)} is {list(entry.shape)}, wanted the matrices of {config.num_experts} experts"
            )
        for expert in range(entry.shape[0]):
            own = f"{prefix}.{naming.experts[part].replace('.E.', f'.{expert}.')}.{kind}"
            yield _weight(own, (entry,), entry.shape[1:], expert=expert)
        return
    if part not in naming.layer:
        raise _unknown(entry.name, config)
    own = f"{prefix}.{naming.layer[part]}"
    shape = (1, *entry.shape) if part == "ffn_gate_inp_shexp" and len(entry.shape) == 1 else entry.shape
    heads = {
        "attn_q": config.size("num_attention_heads"),
        "attn_k": config.get("num_key_value_heads") or config.size("num_attention_heads"),
    }.get(part, 0)
    if heads and naming.permuted and entry.shape[0] % (2 * heads):
        raise BadCheckpoint(f"{described(entry.name)} is {list(entry.shape)}, which {heads} heads do not divide")
    added = -1.0 if naming.norms_less_one and part.endswith("norm") else 0.0
    own = own if part == "attn_sinks" else f"{own}.{kind}"
    yield _weight(own, (entry,), shape, heads=heads if naming.permuted else 0, added=added)


def _pairs(
    config: ModelConfig, entries: Mapping[str, TensorEntry], block: str, layer: int, part: tuple[str, str]
) -> Iterator[GgufWeight]:
    """gpt-oss: rows of gate and up by turns; matrices of experts are [E, K, N] in transformers' module."""
    name, kind = part
    if name == "ffn_up_exps":
        if f"{block}.ffn_gate_exps.{kind}" not in entries:
            raise BadCheckpoint(f"{block}.ffn_gate_exps.{kind} is missing")
        return
    if name not in ("ffn_gate_exps", "ffn_down_exps"):
        raise _unknown(f"{block}.{name}", config)
    names = ("ffn_gate_exps", "ffn_up_exps") if name == "ffn_gate_exps" else ("ffn_down_exps",)
    found = [entries.get(f"{block}.{each}.{kind}") for each in names]
    sources = tuple(each for each in found if each is not None)
    if len(sources) != len(names) or len({each.shape for each in sources}) != 1:
        raise BadCheckpoint(f"{block}.{names[-1]}.{kind} is missing, or of another shape than {block}.{name}.{kind}")
    own = f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if len(sources) > 1 else 'down_proj'}"
    shape = sources[0].shape
    if len(shape) != (3 if kind == "weight" else 2):
        raise BadCheckpoint(f"{block}.{name}.{kind} is {list(shape)}, wanted those of all experts")
    if kind == "weight":
        count, rows, columns = shape
        yield _weight(own, sources, (count, columns, rows * len(sources)), turned=True)
    else:
        yield _weight(f"{own}_bias", sources, (shape[0], shape[1] * len(sources)))


def _weight(
    name: str, sources: tuple[TensorEntry, ...], shape: tuple[int, ...], *, expert: int | None = None, heads: int = 0,
    added: float = 0.0, turned: bool = False,
) -> GgufWeight:  # fmt: skip
    types = {source.dtype for source in sources}
    kind = sources[0].dtype if len(types) == 1 else "mixed"
    floats = types <= set(FLOATS)
    if not floats and (len(shape) < 2 or added):
        raise BadCheckpoint(f"{described(sources[0].name)} is {list(shape)} in {kind}, wanted floats")
    if len(types) > 1 and floats:
        raise BadCheckpoint(f"{described(sources[0].name)} is {' and '.join(sorted(types))}, wanted one of them")
    dtype = next(each for each in DTYPES.values() if each.safetensors == kind) if floats else _WIDENED
    entry = TensorEntry(name, dtype.safetensors, shape, 0, dtype.nbytes * math.prod(shape))
    parts = 1 if expert is None else sources[0].shape[0]
    kept = _KEPT.get(kind, "")
    return GgufWeight(
        entry=entry,
        packing="gguf",
        numbers=kind,
        bits=0 if floats else max(_bits(each) for each in types - set(FLOATS)),
        group=(WHOLE, WHOLE),
        tensors={str(index): source.name for index, source in enumerate(sources)},
        nbytes=sum(source.nbytes for source in sources) // parts,
        label=_OPTIONS[kind] if floats else f"gguf {'+'.join(sorted(types))}",
        turned=turned,
        kept=kept if kept in FORMATS else "",
        sources=tuple(source.name for source in sources),
        expert=expert,
        heads=heads,
        added=added,
    )


def _bits(kind: str) -> int:
    """The bits of a code, by the name of its type: 4 of Q4_K and MXFP4, 2 of IQ2_XXS."""
    found = re.search(r"\d", kind)
    return int(found[0]) if found else 0


def _unknown(name: str, config: ModelConfig) -> BadCheckpoint:
    return BadCheckpoint(f"{described(name)} is no tensor of a model of family {config.family.model_type}")
