"""Which tensors a checkpoint of each family holds, by name and shape, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .config import ModelConfig

# A shape is written in letters, each a size that config.json gives:
# D hidden, Q and K the widths of all query and all key heads, H one head, A heads, F feed-forward, M one expert,
# E experts, V vocabulary. A number in front multiplies.
Tensors = Mapping[str, str]

_QKVO = {
    "self_attn.q_proj.weight": "Q D",
    "self_attn.k_proj.weight": "K D",
    "self_attn.v_proj.weight": "K D",
    "self_attn.o_proj.weight": "D Q",
}
_NORMS = {"input_layernorm.weight": "D", "post_attention_layernorm.weight": "D"}
_MLP_NORMS = {"pre_feedforward_layernorm.weight": "D", "post_feedforward_layernorm.weight": "D"}
_QKVO_BIAS = {f"self_attn.{name}_proj.bias": width for name, width in zip("qkvo", "QKKD", strict=True)}
_HEAD_NORMS = {"self_attn.q_norm.weight": "H", "self_attn.k_norm.weight": "H"}
_MLP = {"mlp.gate_proj.weight": "F D", "mlp.up_proj.weight": "F D", "mlp.down_proj.weight": "D F"}
_MLP_BIAS = {"mlp.gate_proj.bias": "F", "mlp.up_proj.bias": "F", "mlp.down_proj.bias": "D"}
# As published, experts apart or stacked; and as transformers' modules hold them.
_STACKED = {"experts.gate_up_proj": "E 2M D", "experts.down_proj": "E D M"}
_MLP_EXPERTS = {
    "mlp.gate.weight": "E D",
    "mlp.experts.*.gate_proj.weight": "M D",
    "mlp.experts.*.up_proj.weight": "M D",
    "mlp.experts.*.down_proj.weight": "D M",
}
_MLP_STACKED = {"mlp.gate.weight": "E D", **{f"mlp.{name}": shape for name, shape in _STACKED.items()}}


@dataclass(frozen=True, slots=True)
class Inventory:
    """A family's layers: `common` tensors, and one of the spellings of its `mlp` or its `experts`."""

    common: Tensors
    experts: tuple[Tensors, ...] = ()
    expert_width: str = "intermediate_size"


_DENSE = Inventory({**_QKVO, **_NORMS})
_BY_FAMILY: dict[str, Inventory] = {
    "gemma3_text": Inventory(
        {**_QKVO, **_NORMS, **_HEAD_NORMS, **_MLP_NORMS}
    ),
    "gpt_oss": Inventory(
        {**_QKVO, **_NORMS, "self_attn.sinks": "A"},
        (
            {
                "mlp.router.weight": "E D",
                "mlp.router.bias": "E",
                "mlp.experts.gate_up_proj": "E D 2M",
                "mlp.experts.gate_up_proj_bias": "E 2M",
                "mlp.experts.down_proj": "E M D",
                "mlp.experts.down_proj_bias": "E D",
            },
        ),
    ),
    "granitemoe": Inventory(
        {**_QKVO, **_NORMS},
        (
            {
                "block_sparse_moe.router.layer.weight": "E D",
                "block_sparse_moe.input_linear.weight": "E 2M D",
                "block_sparse_moe.output_linear.weight": "E D M",
            },
            {
                "block_sparse_moe.router.weight": "E D",
                **{f"block_sparse_moe.{name}": shape for name, shape in _STACKED.items()},
            },
        ),
    ),
    "llama": _DENSE,
    "mixtral": Inventory(
        {**_QKVO, **_NORMS},
        (
            {
                "block_sparse_moe.gate.weight": "E D",
                "block_sparse_moe.experts.*.w1.weight": "M D",
                "block_sparse_moe.experts.*.w2.weight": "D M",
                "block_sparse_moe.experts.*.w3.weight": "M D",
            },
            _MLP_STACKED,
        ),
    ),
    "olmoe": Inventory(
        {**_QKVO, **_NORMS, "self_attn.q_norm.weight": "Q", "self_attn.k_norm.weight": "K"},
        (_MLP_EXPERTS, _MLP_STACKED),
    ),
    "qwen3": Inventory({**_QKVO, **_NORMS, **_HEAD_NORMS}),
    "qwen3_moe": Inventory(
        {**_QKVO, **_NORMS, **_HEAD_NORMS}, (_MLP_EXPERTS, _MLP_STACKED), expert_width="moe_intermediate_size"
    ),
}  # fmt: skip


def outer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of no layer; the head among them unless it is tied."""
    wanted = {"embed_tokens.weight": "V D", "norm.weight": "D"}
    if not config.get("tie_word_embeddings"):
        wanted["lm_head.weight"] = "V D"
    return dict(_shapes(wanted, config))


def layer_tensors(config: ModelConfig, index: int) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of a layer's tensors, one dictionary for each way of naming them that is read."""
    inventory = _BY_FAMILY[config.family.model_type]
    common = {**inventory.common, **(_QKVO_BIAS if config.get("attention_bias") else {})}
    if has_experts(config, index):
        return [dict(_shapes({**common, **experts}, config)) for experts in inventory.experts]
    return [dict(_shapes({**common, **_MLP, **(_MLP_BIAS if config.get("mlp_bias") else {})}, config))]


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether a layer mixes experts; some families mix in dense layers."""
    if not _BY_FAMILY[config.family.model_type].experts:
        return False
    return (
        index not in (config.get("mlp_only_layers") or ())
        and (index + 1) % (config.get("decoder_sparse_step") or 1) == 0
    )


def _shapes(wanted: Tensors, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    sizes = _sizes(config)
    for name, letters in wanted.items():
        shape = tuple(sizes[letter[-1]] * int(letter[:-1] or 1) for letter in letters.split())
        if "*" in name:
            yield from ((name.replace("*", str(expert)), shape) for expert in range(sizes["E"]))
        else:
            yield name, shape


def _sizes(config: ModelConfig) -> dict[str, int]:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    inventory = _BY_FAMILY[config.family.model_type]
    sizes = {
        "D": hidden,
        "Q": heads * head_dim,
        "K": (config.get("num_key_value_heads") or heads) * head_dim,
        "H": head_dim,
        "A": heads,
        "F": config.size("intermediate_size"),
        "V": config.size("vocab_size"),
    }
    if inventory.experts:
        sizes |= {"E": config.num_experts or 0, "M": config.size(inventory.expert_width)}
    return sizes
