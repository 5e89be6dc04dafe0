"""Shapes of models without their weights: a plain one to vary, and well-known ones from their published configs."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config
from moedge.runtime.shape.model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape


def plain_model(
    num_experts: int = 64, per_token: int = 8, window: int | None = None, num_layers: int = 16
) -> ModelShape:
    """Layers of 2048, about 7 GB in bf16 with 64 experts; every other layer has the window."""
    experts = ExpertsShape(num_experts, per_token, Matrix("up", 2048, 2048), Matrix("down", 2048, 1024))
    dense = (Matrix("q_proj", 4096, 2048), Matrix("o_proj", 2048, 4096))
    layers = tuple(LayerShape(index, dense, experts, 10_000) for index in range(num_layers))
    groups = (
        KVGroup(tuple(range(0, num_layers, 2)), 4, 128, None),
        KVGroup(tuple(range(1, num_layers, 2)), 4, 128, window),
    )
    return ModelShape("qwen3_moe", "bf16", 2048, 32_000, 4096, layers, groups, Matrix("head", 32_000, 2048), 2048)


def choose(
    shape: ModelShape,
    settings: Settings,
    budget: MemoryBudget,
    workload: Workload,
    rates: Rates | None = None,
    factors: dict[str, float] | None = None,
) -> PlanResult:
    """What the planner makes of a request, on a machine with these rates."""
    costs = CostModel(shape, rates, factors)
    return solve(PlanRequest(costs=costs, workload=workload, budget=budget, settings=settings))


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
}  # fmt: skip
GLM_4_5_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "intermediate_size": 10944, "vocab_size": 151552,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": True,
    "partial_rotary_factor": 0.5, "use_qk_norm": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336,
    "vocab_size": 32000, "max_position_embeddings": 32768, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "intermediate_size": 18432, "vocab_size": 129280,
    "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840, "max_position_embeddings": 131072,
}  # fmt: skip
GLM_4_7_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 1536, "intermediate_size": 10240, "vocab_size": 154880,
    "max_position_embeddings": 202752, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    "intermediate_size": 2880, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5120,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "intermediate_size": 10944, "vocab_size": 102400,
    "max_position_embeddings": 163840, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "Qwen3-30B-A3B": QWEN3_30B,
    "Mixtral-8x7B": MIXTRAL,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT,
}
# Larger than the memory of a machine that has a small card.
LARGE_CONFIGS = {"Qwen3-235B-A22B": QWEN3_235B, "GLM-4.5-Air": GLM_4_5_AIR}
LATENT_CONFIGS = {"DeepSeek-V2-Lite": DEEPSEEK_V2_LITE, "DeepSeek-V3": DEEPSEEK_V3, "GLM-4.7-Flash": GLM_4_7_FLASH}


# What the published config of a quantized model says of its weights.
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
QUANTIZATION: dict[str, dict[str, object]] = {
    "gpt-oss-20b": _MXFP4,
    "gpt-oss-120b": _MXFP4,
    "Qwen3-30B-A3B-FP8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    },
    "DeepSeek-V3": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    },
    "Mixtral-8x7B-AWQ": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": ["gate"],
    },
    "Qwen3-30B-A3B-GPTQ-Int4": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
        "modules_to_not_convert": ["gate"],
    },
}  # fmt: skip


def known_shape(name: str, **changes: object) -> ModelShape:
    """As it is worked out from the config, in bfloat16; `changes` replace fields of the config."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps((CONFIGS | LATENT_CONFIGS | LARGE_CONFIGS)[name] | changes))
        return shape_of_config(ModelConfig.read(Path(folder)))


def published_shape(name: str) -> ModelShape:
    """The same with its weights as they are published: quantized, where `QUANTIZATION` says so."""
    model = next(
        each
        for each in sorted(CONFIGS | LATENT_CONFIGS | LARGE_CONFIGS, key=len, reverse=True)
        if name.startswith(each)
    )
    quantization = QUANTIZATION.get(name)
    return known_shape(model, quantization_config=quantization) if quantization else known_shape(model)
