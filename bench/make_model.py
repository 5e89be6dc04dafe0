"""Writes a checkpoint with random weights in a real shape, layer by layer: speed is real, the text is not.

python -m bench.make_model --shape m --out models/m       # 7.04 GB: 16 layers of 64 experts, 8 per token
python -m bench.make_model --shape s --out models/s       # 0.48 GB
python -m bench.make_model --shape wide --out models/wide # 4.31 GB: one layer of 4 GB
python -m bench.make_model --shape q24 --out models/q24   # 30.7 GB: Qwen3-30B-A3B with 24 of its 48 layers
python -m bench.make_model --shape next --out models/next # 2.55 GB: Qwen3-Next, 4 of its 48 layers, 80 of 512 experts
python -m bench.make_model --shape s --skew --out models/k # a fifth of the experts takes four fifths of the tokens
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int = 32000
    max_position_embeddings: int = 4096


@dataclass(frozen=True)
class NextShape(Shape):
    """Qwen3-Next: three of four layers are gated delta nets, the fourth has gated attention."""

    partial_rotary_factor: float = 0.25
    shared_expert_intermediate_size: int = 512
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4


SHAPES = {
    "s": Shape(512, 8, 8, 2, 64, 32, 4, 512),
    "m": Shape(2048, 16, 16, 4, 128, 64, 8, 512),
    "toy": Shape(128, 2, 4, 2, 32, 16, 2, 256, max_position_embeddings=512),
    "wide": Shape(2048, 1, 16, 4, 128, 320, 8, 1024),
    "q24": Shape(2048, 24, 32, 4, 128, 128, 8, 768, vocab_size=151936),
    "next": NextShape(2048, 4, 16, 2, 256, 80, 10, 512),
    "next-toy": NextShape(
        128, 4, 4, 2, 32, 16, 2, 64, max_position_embeddings=512, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip


# What popular experts score beyond others, in standard deviations of a score: with it they are 80 % of the best eighth.
POPULAR = 2.0
# Skewed layers change hidden states little, so that what the embeddings share still shows in the last one.
SKEWED_OUTPUTS = 0.1


class Weights:
    """Random matrices in bf16 whose products keep the scale of their inputs.

    With `skew`, all embeddings share a direction, in which a fifth of the experts, others in every layer, scores high.
    """

    def __init__(self, seed: int, layer: int, hidden: int, skew: bool) -> None:
        common = torch.zeros(hidden)
        if skew:
            common.normal_(0, 1, generator=torch.Generator().manual_seed(seed))
        self._generator = torch.Generator().manual_seed((seed << 16) + layer)
        self.outputs = SKEWED_OUTPUTS if skew else 1.0
        self._common = common / max(float(common.norm()), 1e-9)
        self._skew = skew

    def embedding(self, rows: int, cols: int) -> torch.Tensor:
        """Half of a skewed row's energy is what all rows share."""
        return (self.matrix(rows, cols, 32.0).float() + 32.0 * self._common).bfloat16()

    def matrix(self, rows: int, cols: int, scale: float = 1.0) -> torch.Tensor:
        spread = scale * cols**-0.5
        return torch.empty(rows, cols, dtype=torch.bfloat16).normal_(0, spread, generator=self._generator)

    def router(self, shape: Shape) -> torch.Tensor:
        """Rows of unequal length, log-normal, so that experts are not equally popular."""
        lengths = torch.empty(shape.num_experts, 1).log_normal_(0, 0.4, generator=self._generator)
        rows = self.matrix(shape.num_experts, shape.hidden_size).float()
        if not self._skew:
            return (rows * lengths).bfloat16()
        rows -= torch.outer(rows @ self._common, self._common)
        popular = torch.randperm(len(rows), generator=self._generator)[: len(rows) // 5]
        rows[popular] += POPULAR * shape.hidden_size**-0.5 * self._common
        return rows.bfloat16()


def attention_tensors(shape: Shape, weights: Weights, queries: int) -> dict[str, torch.Tensor]:
    """`queries` are the rows of the first matrix: gated attention has a gate for each element of a query."""
    hidden, width = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": weights.matrix(queries, hidden),
        "self_attn.k_proj.weight": weights.matrix(kv, hidden),
        "self_attn.v_proj.weight": weights.matrix(kv, hidden),
        "self_attn.o_proj.weight": weights.matrix(hidden, width, weights.outputs),
        "self_attn.q_norm.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16),
        "self_attn.k_norm.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16),
    }


def next_tensors(shape: NextShape, index: int, weights: Weights) -> dict[str, torch.Tensor]:
    """A layer of Qwen3-Next without its routed experts."""
    hidden, shared = shape.hidden_size, shape.shared_expert_intermediate_size
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    heads, values = shape.linear_num_value_heads, shape.linear_num_value_heads * shape.linear_value_head_dim
    channels = 2 * keys + values
    if index % 4 == 3:
        tensors = attention_tensors(shape, weights, 2 * shape.num_attention_heads * shape.head_dim)
    else:
        tensors = {
            "linear_attn.in_proj_qkvz.weight": weights.matrix(channels + values, hidden),
            "linear_attn.in_proj_ba.weight": weights.matrix(2 * heads, hidden),
            "linear_attn.conv1d.weight": weights.matrix(channels, shape.linear_conv_kernel_dim).unsqueeze(1),
            "linear_attn.out_proj.weight": weights.matrix(hidden, values, weights.outputs),
            "linear_attn.norm.weight": torch.ones(shape.linear_value_head_dim, dtype=torch.bfloat16),
            "linear_attn.A_log": torch.linspace(0.01, 16, heads).log().bfloat16(),
            "linear_attn.dt_bias": torch.ones(heads, dtype=torch.bfloat16),
        }
    return tensors | {
        "mlp.shared_expert.gate_proj.weight": weights.matrix(shared, hidden),
        "mlp.shared_expert.up_proj.weight": weights.matrix(shared, hidden),
        "mlp.shared_expert.down_proj.weight": weights.matrix(hidden, shared, weights.outputs),
        "mlp.shared_expert_gate.weight": weights.matrix(1, hidden),
    }


def layer_tensors(shape: Shape, index: int, weights: Weights) -> dict[str, torch.Tensor]:
    prefix, hidden, inner = f"model.layers.{index}.", shape.hidden_size, shape.moe_intermediate_size
    heads = shape.num_attention_heads * shape.head_dim
    if isinstance(shape, NextShape):
        tensors = next_tensors(shape, index, weights)
    else:
        tensors = attention_tensors(shape, weights, heads)
    tensors["mlp.gate.weight"] = weights.router(shape)
    for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
        tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    for expert in range(shape.num_experts):
        tensors[f"mlp.experts.{expert}.gate_proj.weight"] = weights.matrix(inner, hidden)
        tensors[f"mlp.experts.{expert}.up_proj.weight"] = weights.matrix(inner, hidden)
        tensors[f"mlp.experts.{expert}.down_proj.weight"] = weights.matrix(hidden, inner, weights.outputs)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_weights(shape: Shape, out: Path, seed: int, skew: bool) -> None:
    """One file per layer, and one for the embedding and the head; layers are drawn at the same time."""
    count = shape.num_hidden_layers + 1

    def write(index: int) -> dict[str, int]:
        weights = Weights(seed, index, shape.hidden_size, skew)
        if index < shape.num_hidden_layers:
            tensors = layer_tensors(shape, index, weights)
        else:
            tensors = {
                "model.embed_tokens.weight": weights.embedding(shape.vocab_size, shape.hidden_size),
                "lm_head.weight": weights.matrix(shape.vocab_size, shape.hidden_size),
                "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
            }
        save_file(tensors, out / _file(index, count), metadata={"format": "pt"})
        return {name: tensor.nbytes for name, tensor in tensors.items()}

    layer_nbytes = 6 * shape.num_experts * shape.hidden_size * shape.moe_intermediate_size
    fit = psutil.virtual_memory().available // (4 * layer_nbytes)
    with ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)), fit))) as pool:
        written = list(pool.map(write, range(count)))
    weight_map = {name: _file(index, count) for index, tensors in enumerate(written) for name in tensors}
    total = sum(sum(tensors.values()) for tensors in written)
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index_json))
    print(f"{total / 1e9:.2f} GB in {count} files")


def _file(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_tokenizer(vocab_size: int, out: Path) -> None:
    """Bytes, and words nobody writes: every token id decodes. One merge: llama.cpp wants some."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġw"]
    vocab = {token: index for index, token in enumerate(tokens)}
    vocab |= {f"Ġw{index}": index for index in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--skew", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    shape = SHAPES[options.shape]
    family = ("Qwen3Next", "qwen3_next") if isinstance(shape, NextShape) else ("Qwen3Moe", "qwen3_moe")
    config = {
        "architectures": [f"{family[0]}ForCausalLM"], "model_type": family[1], "dtype": "bfloat16", "eos_token_id": 1,
        "norm_topk_prob": True, "intermediate_size": shape.moe_intermediate_size, **asdict(shape),
    }  # fmt: skip
    (options.out / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(shape.vocab_size, options.out)
    write_weights(shape, options.out, options.seed, options.skew)


if __name__ == "__main__":
    main()
