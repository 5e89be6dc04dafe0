"""Which weight of transformers' module the tensors of a GGUF file are, by family. Torch-free.

Names of files are those of gguf.constants.TENSOR_NAMES, and what becomes of numbers is undone here that llama.cpp's
converter (its package `conversion`) does to them. Names of weights are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...offload.errors import BadCheckpoint
from .config import ModelConfig

# Where rows begin, and (count, distance) of the loops that give them, the outermost first.
Run = tuple[int, tuple[tuple[int, int], ...]]
# Runs of rows one after another; empty says that rows stay where they are.
Order = tuple[Run, ...]
# Of a config and the number of rows.
OrderOf = Callable[[ModelConfig, int], Order]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A weight: `name` in its layer, with E for the index of an expert, and the tensor's kind behind it unless `whole`.

    `joined` are the tensors whose rows follow those of its own, and `rows` the order of all of them, `columns` that of
    columns. Of `flipped` sources (by index) the last two dimensions are exchanged. `added` is added to numbers; a
    `logarithm` is that of their opposite. A `flat` weight has one dimension, a `turned` one [E, K, N] instead of rows.
    """

    name: str
    joined: tuple[str, ...] = ()
    rows: OrderOf | None = None
    columns: OrderOf | None = None
    flipped: tuple[int, ...] = ()
    added: float = 0.0
    logarithm: bool = False
    flat: bool = False
    turned: bool = False
    whole: bool = False


Names = Mapping[str, str | WeightPart | tuple[WeightPart, ...] | None]


@dataclass(frozen=True, slots=True)
class Naming:
    """`layer` has the parts of a layer's names, with or without their kind; None for what belongs to another part.

    Norms of `less_one` files are 1 more than those of the module. Layers stand under `prefix`.
    """

    layer: Names
    outside: Names = field(default_factory=lambda: OUTSIDE)
    prefix: str = "model.layers"
    less_one: Callable[[str], bool] = lambda part: False


def halves(field_name: str) -> OrderOf:
    """llama.cpp has the two halves of a head by turns, for rotary positions."""

    def order(config: ModelConfig, rows: int) -> Order:
        heads = config.get(field_name) or config.size("num_attention_heads")
        width = _divided(rows, 2 * heads)
        return ((0, ((heads, 2 * width), (2, 1), (width, 2))),)

    return order


def by_turns(config: ModelConfig, rows: int) -> Order:
    """Rows of two tensors by turns."""
    return ((0, ((_divided(rows, 2), 1), (2, rows // 2))),)


def first_half(config: ModelConfig, rows: int) -> Order:
    """The gate of what is joined."""
    return ((0, ((_divided(rows, 2), 1),)),)


def second_half(config: ModelConfig, rows: int) -> Order:
    """What is multiplied by the gate."""
    return ((_divided(rows, 2), ((rows // 2, 1),)),)


def _delta(config: ModelConfig) -> tuple[int, int, int, int]:
    """Of gated delta nets: key heads, value heads of each, and the elements of a key and a value."""
    keys, key_dim, value_dim = (
        config.size(f"linear_{name}") for name in ("num_key_heads", "key_head_dim", "value_head_dim")
    )
    return keys, _divided(config.size("linear_num_value_heads"), keys), key_dim, value_dim


def grouped_values(width: str = "", *, behind_keys: bool = False) -> OrderOf:
    """Value heads by key head; llama.cpp has the first of each key head first, then the second of each."""

    def order(config: ModelConfig, rows: int) -> Order:
        keys, each, key_dim, value_dim = _delta(config)
        before, dim = 2 * keys * key_dim if behind_keys else 0, value_dim if width else 1
        values = (before, ((keys, dim), (each, keys * dim), (dim, 1)))
        return ((0, ((before, 1),)), values) if before else (values,)

    return order


def queries_by_head(config: ModelConfig, rows: int) -> Order:
    """Query, key, values and gates of each key head together, which the file has one kind after another."""
    keys, each, key_dim, value_dim = _delta(config)
    sizes = (key_dim, key_dim, each * value_dim, each * value_dim)
    begins = [keys * sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(
        (begin + head * size, ((size, 1),)) for head in range(keys) for begin, size in zip(begins, sizes, strict=True)
    )


def latents_by_head(config: ModelConfig, rows: int) -> Order:
    """The rows of each head for its keys, then those for its values; the file has all keys first."""
    heads, keys, values = (config.size(name) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    pairs = ((head * keys, ((keys, 1),)) for head in range(heads))
    behind = ((heads * keys + head * values, ((values, 1),)) for head in range(heads))
    return tuple(run for both in zip(pairs, behind, strict=True) for run in both)


def _divided(count: int, divisor: int) -> int:
    if divisor < 1 or count % divisor:
        raise BadCheckpoint(f"{count} rows are not a multiple of {divisor}")
    return count // divisor


OUTSIDE: Names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GATED = ("gate_proj", "up_proj", "down_proj")
_KINDS = ("gate", "up", "down")


def _network(block: str, names: tuple[str, ...] = _GATED, suffix: str = "") -> dict[str, str]:
    return {f"ffn_{kind}{suffix}": f"{block}.{name}" for kind, name in zip(_KINDS, names, strict=True)}


def _experts(block: str, names: tuple[str, ...] = _GATED) -> Names:
    """Experts that lie one by one in published checkpoints."""
    found = _network(f"{block}.E", names, "_exps")
    both = (WeightPart(found["ffn_gate_exps"], rows=first_half), WeightPart(found["ffn_up_exps"], rows=second_half))
    return {**found, "ffn_gate_up_exps": both}


def _stacked(both: WeightPart, down: WeightPart, suffix: str = "_exps") -> Names:
    """Those of all experts in one tensor, the rows of gate and up in another."""
    gate, up = f"ffn_gate{suffix}", f"ffn_up{suffix}"
    return {
        gate: replace(both, joined=(up,)), up: None, f"ffn_gate_up{suffix}": both, f"ffn_down{suffix}": down,
    }  # fmt: skip


_ATTENTION: Names = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_SCORES = ("exp_probs_b", "exp_probs_b.bias")


def _corrections(name: str) -> dict[str, WeightPart]:
    """What is added to a router's scores where it chooses; some files leave the kind away."""
    return dict.fromkeys(_SCORES, WeightPart(name, whole=True))


_LAYER: Names = {
    **_ATTENTION, **_network("mlp"), "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_MOE: Names = {
    **_LAYER, **_experts("mlp.experts"), **_network("mlp.shared_experts", suffix="_shexp"), "ffn_gate_inp": "mlp.gate",
    **_corrections("mlp.gate.e_score_correction_bias"),
}  # fmt: skip
_SHARED_BY_GATE: Names = {
    **_network("mlp.shared_expert", suffix="_shexp"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
# llama.cpp turns neighbours of a head together, transformers its halves.
_PERMUTED: Names = {
    "attn_q": WeightPart("self_attn.q_proj", rows=halves("num_attention_heads")),
    "attn_k": WeightPart("self_attn.k_proj", rows=halves("num_key_value_heads")),
}
_ROUTED_W: Names = {**_experts("block_sparse_moe.experts", ("w1", "w3", "w2")), "ffn_gate_inp": "block_sparse_moe.gate"}
_SANDWICH: Names = {
    "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LATENT: Names = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_v_b": None,
    # Absorbed: [heads, latent, keys], whose heads are turned, and [heads, values, latent].
    "attn_k_b": WeightPart("self_attn.kv_b_proj", joined=("attn_v_b",), rows=latents_by_head, flipped=(0,)),
}  # fmt: skip
_INDEXER: Names = {
    "indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk", "indexer.attn_q_b": "self_attn.indexer.wq_b",
}  # fmt: skip


def _state(block: str, *, decay: str = "A_log", flat: bool = True) -> Names:
    """Mamba-2 and gated delta nets: the file has -exp(A_log), and vectors by group or by head."""
    return {
        "ssm_a": WeightPart(f"{block}.{decay}", logarithm=True, flat=flat, whole=True),
        "ssm_d": WeightPart(f"{block}.D", flat=True, whole=True), "ssm_conv1d": f"{block}.conv1d",
        "ssm_dt.bias": WeightPart(f"{block}.dt_bias", whole=True), "ssm_in": f"{block}.in_proj",
        "ssm_norm": WeightPart(f"{block}.norm", flat=True), "ssm_out": f"{block}.out_proj",
    }  # fmt: skip


_DELTA: Names = {
    **_state("linear_attn"),
    "post_attention_norm": "post_attention_layernorm",
}
_QWEN_3_5: Names = {
    **_DELTA,
    "attn_qkv": WeightPart("linear_attn.in_proj_qkv", rows=grouped_values("value", behind_keys=True)),
    "attn_gate": WeightPart("linear_attn.in_proj_z", rows=grouped_values("value")),
    "ssm_alpha": WeightPart("linear_attn.in_proj_a", rows=grouped_values()),
    "ssm_beta": WeightPart("linear_attn.in_proj_b", rows=grouped_values()),
    "ssm_a": WeightPart("linear_attn.A_log", rows=grouped_values(), logarithm=True, whole=True),
    "ssm_dt.bias": WeightPart("linear_attn.dt_bias", rows=grouped_values(), whole=True),
    "ssm_conv1d": WeightPart("linear_attn.conv1d", rows=grouped_values("value", behind_keys=True)),
    "ssm_out": WeightPart("linear_attn.out_proj", columns=grouped_values("value")),
}
_CONVOLUTION: Names = {
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
}  # fmt: skip
_NORM_OF_EMBEDDING: Names = {**OUTSIDE, **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")}
_QUERY_LAYERNORM: Names = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_GRANITE_EXPERTS: Names = {
    **_stacked(WeightPart("block_sparse_moe.input_linear"), WeightPart("block_sparse_moe.output_linear")),
    **_stacked(WeightPart("shared_mlp.input_linear"), WeightPart("shared_mlp.output_linear"), "_shexp"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}  # fmt: skip
_JOINT: Names = {"ffn_up": "mlp.gate_up_proj", "attn_qkv": "self_attn.qkv_proj"}
_TURNED = WeightPart("experts", turned=True, whole=True)


def _less_one(part: str) -> bool:
    return part.endswith("norm")


def _less_one_but_gated(part: str) -> bool:
    return part.endswith("norm") and part != "ssm_norm"


NAMINGS: Mapping[str, Naming] = {
    "afmoe": Naming(
        {**_MOE, **_SANDWICH, "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm",
         "attn_gate": "self_attn.gate_proj", "ffn_gate_inp": "mlp.router.gate", **_corrections("mlp.expert_bias")},
    ),
    "arcee": Naming({**_LAYER, **_PERMUTED}),
    "cohere": Naming(_LAYER),
    "cohere2": Naming(_LAYER),
    "cohere2_moe": Naming(_MOE),
    "deepseek_v2": Naming({**_MOE, **_LATENT}),
    "deepseek_v3": Naming({**_MOE, **_LATENT}),
    "deepseek_v32": Naming({**_MOE, **_LATENT, **_INDEXER}),
    "dots1": Naming(_MOE),
    "ernie4_5": Naming(_LAYER),
    "ernie4_5_moe": Naming({**_MOE, **_corrections("mlp.moe_statics.e_score_correction_bias")}),
    "exaone4": Naming(
        {**_LAYER, "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "exaone_moe": Naming({**_MOE, **_corrections("mlp.e_score_correction_bias")}),
    "gemma": Naming(_LAYER, less_one=_less_one),
    "gemma2": Naming({**_LAYER, **_SANDWICH}, less_one=_less_one),
    "gemma3_text": Naming({**_LAYER, **_SANDWICH}, less_one=_less_one),
    "gemma4_text": Naming(
        {**_LAYER, **_SANDWICH,
         **_stacked(WeightPart("experts.gate_up_proj", whole=True), WeightPart("experts.down_proj", whole=True)),
         "layer_output_scale.weight": WeightPart("layer_scalar", whole=True), "inp_gate": "per_layer_input_gate",
         "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
         "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
         "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "ffn_gate_inp": "router.proj",
         "ffn_gate_inp.scale": WeightPart("router.scale", whole=True),
         "ffn_down_exps.scale": WeightPart("router.per_expert_scale", whole=True)},
        {**OUTSIDE, "per_layer_token_embd": "model.embed_tokens_per_layer",
         "per_layer_model_proj": "model.per_layer_model_projection",
         "per_layer_proj_norm": "model.per_layer_projection_norm"},
    ),
    "glm4": Naming(
        {**_LAYER, **_JOINT, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
    "glm4_moe": Naming({**_MOE, "post_attention_norm": "post_attention_layernorm"}),
    "gpt_oss": Naming(
        {**_LAYER, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
         "attn_sinks.weight": WeightPart("self_attn.sinks", whole=True),
         **_stacked(replace(_TURNED, name="mlp.experts.gate_up_proj", rows=by_turns),
                    replace(_TURNED, name="mlp.experts.down_proj")),
         "ffn_gate_exps.bias": WeightPart("mlp.experts.gate_up_proj_bias", ("ffn_up_exps",), by_turns, whole=True),
         "ffn_down_exps.bias": WeightPart("mlp.experts.down_proj_bias", whole=True)},
    ),
    "granite": Naming({**_LAYER, **_PERMUTED}),
    "granitemoe": Naming({**_LAYER, **_PERMUTED, **_GRANITE_EXPERTS}),
    "granitemoehybrid": Naming(
        {**_LAYER, **_PERMUTED, **_GRANITE_EXPERTS, **_state("mamba"),
         **_stacked(WeightPart("shared_mlp.input_linear"), WeightPart("shared_mlp.output_linear"), "")},
    ),
    "granitemoeshared": Naming({**_LAYER, **_PERMUTED, **_GRANITE_EXPERTS}),
    "hunyuan_v1_dense": Naming({**_LAYER, **_QUERY_LAYERNORM}),
    "hunyuan_v1_moe": Naming(
        {**_MOE, **_QUERY_LAYERNORM, **_network("mlp.shared_mlp", suffix="_shexp"), "ffn_gate_inp": "mlp.gate.wg"},
    ),
    "jamba": Naming(
        {**_LAYER, **_network("feed_forward"), **_experts("feed_forward.experts"), **_state("mamba", flat=False),
         "ffn_norm": "pre_ff_layernorm", "ffn_gate_inp": "feed_forward.router", "ssm_x": "mamba.x_proj",
         "ssm_dt.bias": "mamba.dt_proj", "ssm_dt": "mamba.dt_proj", "ssm_b_norm": "mamba.b_layernorm",
         "ssm_c_norm": "mamba.c_layernorm", "ssm_dt_norm": "mamba.dt_layernorm"},
        {**OUTSIDE, "output_norm": "model.final_layernorm"},
    ),
    "lfm2": Naming(
        {**_ATTENTION, **_CONVOLUTION, **_network("feed_forward", ("w1", "w3", "w2"))}, _NORM_OF_EMBEDDING,
    ),
    "lfm2_moe": Naming(
        {**_ATTENTION, **_CONVOLUTION, **_network("feed_forward", ("w1", "w3", "w2")),
         **_experts("feed_forward.experts", ("w1", "w3", "w2")), "ffn_gate_inp": "feed_forward.gate",
         **_corrections("feed_forward.expert_bias")},
        _NORM_OF_EMBEDDING,
    ),
    "llama": Naming({**_LAYER, **_PERMUTED}),
    "llama4_text": Naming(
        {**_LAYER, **_network("feed_forward"), **_network("feed_forward.shared_expert", suffix="_shexp"),
         **_stacked(replace(_TURNED, name="feed_forward.experts.gate_up_proj"),
                    replace(_TURNED, name="feed_forward.experts.down_proj")),
         "ffn_gate_inp": "feed_forward.router"},
    ),
    "mellum": Naming(_MOE),
    "mimo_v2_flash": Naming({**_MOE, "attn_sinks.weight": WeightPart("self_attn.attention_sink_bias", whole=True)}),
    "minimax_m2": Naming({**_LAYER, **_ROUTED_W, **_corrections("block_sparse_moe.e_score_correction_bias")}),
    "mixtral": Naming({**_LAYER, **_PERMUTED, **_ROUTED_W}),
    "nemotron_h": Naming(
        {**{part: name.replace("self_attn", "mixer") for part, name in _ATTENTION.items() if isinstance(name, str)},
         **{part: replace(each, name=each.name.replace("self_attn", "mixer")) for part, each in _PERMUTED.items()
            if isinstance(each, WeightPart)},
         **_network("mixer"), **_experts("mixer.experts"), **_network("mixer.shared_experts", suffix="_shexp"),
         **_state("mixer"), "attn_norm": "norm", "ffn_gate_inp": "mixer.gate",
         "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
         **_corrections("mixer.gate.e_score_correction_bias")},
        {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        "backbone.layers",
    ),
    "olmo2": Naming({**_LAYER, **_SANDWICH}),
    "olmo3": Naming({**_LAYER, **_SANDWICH}),
    "olmoe": Naming(_MOE),
    "phi3": Naming({**_LAYER, **_JOINT}),
    "phimoe": Naming({**_LAYER, **_ROUTED_W}),
    "qwen2": Naming(_LAYER),
    "qwen2_moe": Naming({**_MOE, **_SHARED_BY_GATE}),
    "qwen3": Naming(_LAYER),
    "qwen3_5_moe_text": Naming({**_MOE, **_SHARED_BY_GATE, **_QWEN_3_5}, less_one=_less_one_but_gated),
    "qwen3_5_text": Naming({**_LAYER, **_QWEN_3_5}, less_one=_less_one_but_gated),
    "qwen3_moe": Naming(_MOE),
    "qwen3_next": Naming(
        # The oldest files have the matrix of all four as it was.
        {**_MOE, **_SHARED_BY_GATE, **_DELTA, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
         "attn_gate": None,
         "attn_qkv": WeightPart("linear_attn.in_proj_qkvz", ("attn_gate",), queries_by_head)},
        less_one=_less_one_but_gated,
    ),
    "seed_oss": Naming({**_LAYER, "post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Naming({**_LAYER, **_PERMUTED}),
    "starcoder2": Naming({**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}  # fmt: skip
