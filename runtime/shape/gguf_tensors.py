"""Which tensors of a GGUF file make up a weight of a family as transformers names and shapes it. Torch-free.

Names are those of gguf.constants.TENSOR_NAMES. Stacked experts become one weight each, so that they are read one by
one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...quant.formats.dtypes import DTYPES, OPTION_DTYPES
from ...quant.formats.format import FORMATS
from .config import ModelConfig
from .quantization import WHOLE
from .quantized import ModelTensors, QuantizedWeight

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
        _check_type(entry)
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
    heads = {"attn_q": config.size("num_attention_heads"), "attn_k": _kv_heads(config)}.get(part, 0)
    if heads and naming.permuted and entry.shape[0] % (2 * heads):
        raise BadCheckpoint(f"{described(entry.name)} is {list(entry.shape)}, which {heads} heads do not divide")
    added = -1.0 if naming.norms_less_one and part.endswith("norm") else 0.0
    own = own if part == "attn_sinks" else f"{own}.{kind}"
    yield _weight(own, (entry,), shape, heads=heads if naming.permuted else 0, added=added)


def _kv_heads(config: ModelConfig) -> int:
    return config.get("num_key_value_heads") or config.size("num_attention_heads")


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


def _check_type(entry: TensorEntry) -> None:
    if entry.dtype not in (*FLOATS, *BLOCKS):
        raise BadCheckpoint(f"{described(entry.name)} is {entry.dtype}, wanted one of {', '.join((*FLOATS, *BLOCKS))}")


def _unknown(name: str, config: ModelConfig) -> BadCheckpoint:
    return BadCheckpoint(f"{described(name)} is no tensor of a model of family {config.family.model_type}")
