"""The tensors that a checkpoint of a family holds, worked out from its config.json: for plans without any weights.

Names and shapes are those of transformers' own modules of these families (modeling_*.py), without importing them; of
other families transformers is asked (model/definition.py).

Torch-free. The layouts are those that quantized.py reads, which makes a shape of these tensors as of those of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from ...offload.checkpoint.header import TensorEntry
from ...quant.formats.format import OPTION_DTYPES
from .config import ModelConfig, head_dim, kv_heads
from .model_shape import ModelShape
from .quantization import BNB_BLOCK, WHOLE, Quantization, Scheme, num_groups
from .read import LAYER, divided, is_expert, is_matrix, model_shape, tensors_of

_NBYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4}
# Instead of a dtype: that of the model.
_MODELS = ""
# Dtype and shape of a tensor by its suffix, instead of ".weight".
_Parts = Mapping[str, tuple[str, tuple[int, ...]]]


def quantized_entries(
    quantization: Quantization, entries: Mapping[str, TensorEntry], transposed_experts: bool
) -> dict[str, TensorEntry]:
    """`entries`, which hold floats, with the layers' matrices as the scheme stores them.

    Left as they are: routers, which no published checkpoint quantizes, and modules that the config names. MXFP4 stores
    stacked experts alone so.
    """
    if quantization.method == "mxfp4":
        return dict(_stacked(entries, transposed_experts))
    scheme, parts = quantization.schemes[0], _PARTS.get(quantization.method) or partial(_bitsandbytes, quantization)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        if not _is_quantized(name, entry, quantization.unquantized):
            found[name] = entry
            continue
        rows, columns = entry.shape
        for suffix, (dtype, shape) in parts(rows, columns, scheme).items():
            found[f"{module}.{suffix}"] = _entry(f"{module}.{suffix}", dtype or entry.dtype, shape)
    return found


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, _NBYTES[dtype] * math.prod(shape))


def _is_quantized(name: str, entry: TensorEntry, unquantized: frozenset[str]) -> bool:
    """A name in the config means the modules that it is a part of, between dots."""
    if not LAYER.search(name) or not is_matrix(name) or len(entry.shape) != 2:
        return False
    return not any(f".{part}." in f".{name}" for part in unquantized)


def _stacked(entries: Mapping[str, TensorEntry], transposed: bool) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in entries.items():
        if not is_expert(name, entry) or len(entry.shape) != 3:
            yield name, entry
            continue
        count, columns, rows = entry.shape if transposed else (entry.shape[0], entry.shape[2], entry.shape[1])
        yield f"{name}_blocks", _entry(f"{name}_blocks", "U8", (count, rows, columns // 32, 16))
        yield f"{name}_scales", _entry(f"{name}_scales", "U8", (count, rows, columns // 32))


def _grid(rows: int, columns: int, scheme: Scheme) -> tuple[int, int]:
    return num_groups(rows, scheme.group[0]), num_groups(columns, scheme.group[1])


def _fp8(rows: int, columns: int, scheme: Scheme) -> _Parts:
    # MXFP8's scales are exponents.
    dtype = "U8" if scheme.group == (1, 32) else "F32"
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": (dtype, _grid(rows, columns, scheme))}


def _fbgemm(rows: int, columns: int, scheme: Scheme) -> _Parts:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows, 1))}


def _gptq(rows: int, columns: int, scheme: Scheme) -> _Parts:
    groups = num_groups(columns, scheme.group[1])
    return {
        "qweight": ("I32", (columns * scheme.bits // 32, rows)),
        "qzeros": ("I32", (groups, rows * scheme.bits // 32)),
        "scales": ("F16", (groups, rows)),
        "g_idx": ("I32", (columns,)),
    }


def _awq(rows: int, columns: int, scheme: Scheme) -> _Parts:
    groups = num_groups(columns, scheme.group[1])
    zeros = ("I32", (groups, rows // 8))
    return {"qweight": ("I32", (columns, rows // 8)), "qzeros": zeros, "scales": ("F16", (groups, rows))}


def _compressed_tensors(rows: int, columns: int, scheme: Scheme) -> _Parts:
    grid = _grid(rows, columns, scheme)
    if scheme.bits == 8 and (scheme.numbers == "float" or scheme.group[1] == WHOLE):
        codes = "I8" if scheme.numbers == "int" else "F8_E4M3"
        return {"weight": (codes, (rows, columns)), "weight_scale": (_MODELS, grid)}
    if scheme.numbers == "float":
        whole: _Parts = {"weight_global_scale": ("F32", (1,))} if scheme.group[1] == 16 else {}
        packed = {"weight_packed": ("U8", (rows, columns // 2))}
        return {**packed, "weight_scale": ("F8_E4M3" if whole else "U8", grid), **whole}
    zeros: _Parts = {} if scheme.symmetric else {"weight_zero_point": ("I32", (-(-rows * scheme.bits // 32), grid[1]))}
    words = -(-columns * scheme.bits // 32)
    return {"weight_packed": ("I32", (rows, words)), "weight_scale": (_MODELS, grid), **zeros}


# Scales that share one of their own, where bitsandbytes quantizes them.
_NESTED_BLOCK = 256
# Bytes of the JSON text that says what a weight is.
_STATE_NBYTES = 100


def _bitsandbytes(quantization: Quantization, rows: int, columns: int, scheme: Scheme) -> _Parts:
    if scheme.bits == 8:
        return {"weight": ("I8", (rows, columns)), "SCB": ("F32", (rows,))}
    blocks = -(-rows * columns // BNB_BLOCK)
    found = {
        "weight": ("U8", (rows * columns // 2, 1)),
        "weight.absmax": ("U8" if quantization.nested else "F32", (blocks,)),
        "weight.quant_map": ("F32", (16,)),
        f"weight.quant_state.bitsandbytes__{quantization.levels}": ("U8", (_STATE_NBYTES,)),
    }
    if quantization.nested:
        found["weight.nested_absmax"] = ("F32", (-(-blocks // _NESTED_BLOCK),))
        found["weight.nested_quant_map"] = ("F32", (256,))
    return found


def _bitsandbytes_state(quantization: Quantization, entries: Mapping[str, TensorEntry], name: str) -> bytes:
    """The text in a tensor `name`, of a weight that `entries` have in floats: headers do not say its shape."""
    values: dict[str, object] = {"shape": entries[name.partition(".quant_state.")[0]].shape, "blocksize": BNB_BLOCK}
    nested = {"nested_blocksize": _NESTED_BLOCK, "nested_offset": 0.0} if quantization.nested else {}
    return json.dumps({**values, "quant_type": quantization.levels, **nested}).encode()


_PARTS: Mapping[str, Callable[[int, int, Scheme], _Parts]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}


_Shapes = dict[str, tuple[int, ...]]
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Published checkpoints that name no dtype are in this one.
_USUAL_DTYPE = "bf16"


def shape_of_config(config: ModelConfig, dtype: str | None = None, shapes: _Shapes | None = None) -> ModelShape:
    """The shape of the model that a config describes; `dtype` as config.json names it, such as "bfloat16".

    `shapes` are those of a checkpoint in floats; None for families whose tensors are worked out here. Raises
    UnsupportedModel.
    """
    option = _DTYPES.get(dtype or "", _USUAL_DTYPE)
    floats = OPTION_DTYPES[option]
    whole = [
        TensorEntry(name, floats.safetensors, shape, 0, floats.nbytes * math.prod(shape))
        for name, shape in (shapes or tensor_shapes(config)).items()
    ]
    entries = {part.name: part for entry in whole for part in divided(config, entry)}
    if config.quantization is None:
        return model_shape(config, entries)
    stored = quantized_entries(config.quantization, entries, config.family.transposed_experts)
    # Only bitsandbytes keeps in files what headers do not say.
    read = partial(_bitsandbytes_state, config.quantization, entries) if config.quantization.levels else None
    return model_shape(config, tensors_of(config, stored, read))


def is_worked_out(config: ModelConfig) -> bool:
    """Whether `tensor_shapes` knows the family."""
    return config.family.model_type in _FEED_FORWARD


def tensor_shapes(config: ModelConfig) -> _Shapes:
    """Shape by name of every tensor of a checkpoint of a family that `is_worked_out`."""
    family = config.family.model_type
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    shapes: _Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config.size("num_hidden_layers")):
        parts = _attention(config, layer) | _FEED_FORWARD[family](config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention(config: ModelConfig, layer: int) -> _Shapes:
    if config.is_latent:
        return _latent_attention(config)
    if config.family.model_type == "qwen3_next" and _is_recurrent(config, layer):
        return _gated_delta_net(config)
    family, hidden, dim = config.family.model_type, config.size("hidden_size"), head_dim(config, layer)
    queries, keys = config.size("num_attention_heads") * dim, kv_heads(config, layer) * dim
    # Half of what makes queries is a gate on attention's output in this family.
    gated = 2 if family == "qwen3_next" else 1
    sides = {"q_proj": (gated * queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    outputs = {**sides, "o_proj": (hidden, queries)}
    found: _Shapes = {f"self_attn.{name}.weight": shape for name, shape in outputs.items()}
    biased = {"gpt_oss": outputs, "qwen2": sides, "qwen2_moe": sides}.get(family, {})
    found |= {f"self_attn.{name}.bias": shape[:1] for name, shape in biased.items()}
    if family == "gpt_oss":
        found["self_attn.sinks"] = (config.size("num_attention_heads"),)
    if family in {"qwen3", "qwen3_moe", "qwen3_next"}:
        found |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if family == "olmoe":
        found |= {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    return found | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _is_recurrent(config: ModelConfig, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "linear_attention")
    return (layer + 1) % int(config.get("full_attention_interval") or 4) != 0


def _gated_delta_net(config: ModelConfig) -> _Shapes:
    hidden, heads = config.size("hidden_size"), config.size("linear_num_value_heads")
    keys = config.size("linear_num_key_heads") * config.size("linear_key_head_dim")
    values = heads * config.size("linear_value_head_dim")
    found: _Shapes = {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "in_proj_ba.weight": (2 * heads, hidden),
        "conv1d.weight": (2 * keys + values, 1, config.size("linear_conv_kernel_dim")),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.size("linear_value_head_dim"),),
        "out_proj.weight": (hidden, values),
    }
    found = {f"linear_attn.{name}": shape for name, shape in found.items()}
    return found | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _latent_attention(config: ModelConfig) -> _Shapes:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent, rotated = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    keys, values = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    outputs = {
        "kv_a_proj_with_mqa": (latent + rotated, hidden),
        "kv_b_proj": (heads * (keys + values), latent),
        "o_proj": (hidden, heads * values),
    }
    found: _Shapes = {"self_attn.kv_a_layernorm.weight": (latent,)}
    if (rank := config.get("q_lora_rank")) is None:
        outputs["q_proj"] = (heads * (keys + rotated), hidden)
    else:
        outputs |= {"q_a_proj": (rank, hidden), "q_b_proj": (heads * (keys + rotated), rank)}
        found["self_attn.q_a_layernorm.weight"] = (rank,)
    found |= {f"self_attn.{name}.weight": shape for name, shape in outputs.items()}
    return found | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _gated(prefix: str, hidden: int, inner: int) -> _Shapes:
    up = {f"{prefix}.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
    return {**up, f"{prefix}.down_proj.weight": (hidden, inner)}


def _dense(config: ModelConfig, layer: int) -> _Shapes:
    return _gated("mlp", config.size("hidden_size"), config.size("intermediate_size"))


def _qwen_experts(config: ModelConfig, layer: int) -> _Shapes:
    """Layers are sparse every `decoder_sparse_step`, but for those that `mlp_only_layers` names."""
    step = config.get("decoder_sparse_step") or 1
    if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step:
        return _dense(config, layer)
    hidden, inner = config.size("hidden_size"), config.size("moe_intermediate_size")
    found = _routed(config, "mlp", inner)
    if config.family.model_type in {"qwen2_moe", "qwen3_next"}:
        found |= _gated("mlp.shared_expert", hidden, config.size("shared_expert_intermediate_size"))
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found


def _olmoe_experts(config: ModelConfig, layer: int) -> _Shapes:
    return _routed(config, "mlp", config.size("intermediate_size"))


def _routed(config: ModelConfig, prefix: str, inner: int) -> _Shapes:
    hidden, count = config.size("hidden_size"), config.num_experts or 0
    found: _Shapes = {f"{prefix}.gate.weight": (count, hidden)}
    for expert in range(count):
        found |= _gated(f"{prefix}.experts.{expert}", hidden, inner)
    return found


def _deepseek_experts(config: ModelConfig, layer: int) -> _Shapes:
    """The first layers are dense; the others have shared experts as one network."""
    dense = layer < (config.get("first_k_dense_replace") or 0)
    return _dense(config, layer) if dense else _shared_and_routed(config)


def _glm_lite_experts(config: ModelConfig, layer: int) -> _Shapes:
    kinds = config.get("mlp_layer_types")
    dense = layer == 0 if kinds is None else kinds[layer] == "dense"
    return _dense(config, layer) if dense else _shared_and_routed(config)


def _shared_and_routed(config: ModelConfig) -> _Shapes:
    inner = config.size("moe_intermediate_size")
    found = _routed(config, "mlp", inner)
    if shared := config.get("n_shared_experts"):
        found |= _gated("mlp.shared_experts", config.size("hidden_size"), shared * inner)
    if config.family.model_type != "deepseek_v2":
        found["mlp.gate.e_score_correction_bias"] = (config.num_experts or 0,)
    return found


def _mixtral_experts(config: ModelConfig, layer: int) -> _Shapes:
    hidden, inner, count = config.size("hidden_size"), config.size("intermediate_size"), config.num_experts or 0
    found: _Shapes = {"block_sparse_moe.gate.weight": (count, hidden)}
    for expert in range(count):
        sides = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
        found |= {f"block_sparse_moe.experts.{expert}.{name}.weight": shape for name, shape in sides.items()}
    return found


def _gpt_oss_experts(config: ModelConfig, layer: int) -> _Shapes:
    hidden, inner, count = config.size("hidden_size"), config.size("intermediate_size"), config.num_experts or 0
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


_FEED_FORWARD: Mapping[str, Callable[[ModelConfig, int], _Shapes]] = {
    "deepseek_v2": _deepseek_experts,
    "deepseek_v3": _deepseek_experts,
    "glm4_moe": _deepseek_experts,
    "glm4_moe_lite": _glm_lite_experts,
    "gpt_oss": _gpt_oss_experts,
    "llama": _dense,
    "mistral": _dense,
    "mixtral": _mixtral_experts,
    "olmoe": _olmoe_experts,
    "qwen2": _dense,
    "qwen2_moe": _qwen_experts,
    "qwen3": _dense,
    "qwen3_moe": _qwen_experts,
    "qwen3_next": _qwen_experts,
}
