"""Models of real shapes with random packed weights, made where they stay: no checkpoint, no download.

Speed is real, the text is not. Experts are unequally popular, since routers' rows are of unequal length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from moedge.offload.checkpoint.header import TensorEntry
from moedge.offload.device import Device
from moedge.offload.stream.stream import DENSE, HEAD
from moedge.quant.formats.format import Layout
from moedge.quant.tensor import pack_into, torch_dtype
from moedge.runtime.loading.engine_loader import LoadedEngine, Loading
from moedge.runtime.model.definition import define
from moedge.runtime.plan.placement import Plan
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.read import is_router, model_shape
from moedge.runtime.shape.shards import ModelShards
from moedge.runtime.source.model_source import ModelSource
from moedge.runtime.weights.key_offsets import KeyOffsets
from moedge.runtime.weights.memory import WeightMemory

# As published on the hub, without what decides no size and no arithmetic.
CONFIGS: dict[str, dict[str, Any]] = {
    # bench.make_model's, which hides nothing of a host behind products.
    "s": {
        "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "vocab_size": 32000,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": 1,
    },
    "qwen3": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "eos_token_id": 151645,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None,
        "tie_word_embeddings": False, "eos_token_id": 2,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True,
        "sliding_window": 128, "tie_word_embeddings": False, "eos_token_id": 200002,
    },
}  # fmt: skip


@contextmanager
def random_source(name: str, **smaller: int) -> Iterator[ModelSource]:
    """A model of `CONFIGS`, with some sizes changed; its folder has a config and nothing else."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder), name, smaller)
        config = ModelConfig.read(Path(folder))
        yield ModelSource(name, Path(folder), model_shape(config, dict(_entries(config))))


def write_config(folder: Path, name: str, smaller: Mapping[str, int]) -> None:
    values = {"architectures": [], "dtype": "bfloat16", **CONFIGS[name], **smaller}
    (folder / "config.json").write_text(json.dumps(values))


def load_random(source: ModelSource, plan: Plan, device: Device | None) -> LoadedEngine:
    """An engine whose weights, all in memory, are random in the plan's format."""
    loading = Loading(source, plan, device)
    layers = loading.install_layers()
    _fill_resident(loading.model)
    _fill(loading.memory, loading.shards)
    # There is no tokenizer to measure any with, and random keys have no bias.
    shapes = {
        layer: (group.kv_heads, group.head_dim)
        for group in source.shape.kv_groups
        if not group.is_index
        for layer in group.layers
    }
    offsets = KeyOffsets({layer: torch.zeros(shapes[layer]) for layer in sorted(shapes)})
    return loading.finish(layers, key_offsets=offsets)


def _entries(config: ModelConfig) -> Iterator[tuple[str, TensorEntry]]:
    """Tensors as transformers' modules hold them, which is one of the ways in which checkpoints are read."""
    for name, parameter in define(config, torch.bfloat16).named_parameters():
        yield name, TensorEntry(name, "BF16", tuple(parameter.shape), 0, 2 * parameter.numel())


def _fill_resident(model: Any) -> None:
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta or module is head:
                continue
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
            if is_router(f"{path}.{name}"):
                value.normal_(0, parameter.shape[1] ** -0.5)
                value *= torch.empty(len(value), 1).log_normal_(0, 0.4).to(value.dtype)
            elif parameter.dim() == 1 and name == "weight":
                value.fill_(1)
            else:
                value.normal_(0, 1.0 if parameter.dim() == 2 and name == "weight" else 0.02)
            module._parameters[name] = nn.Parameter(value, requires_grad=False)


def _fill(memory: WeightMemory, shards: ModelShards) -> None:
    noise = torch.randn(16 << 20)
    packed: dict[tuple[str, str, tuple[int, int]], torch.Tensor] = {}
    for key in (*memory.held, *memory.staged):
        layout = shards.head if key == HEAD else shards.layers[key.layer].expert
        layout = shards.layers[key.layer].dense if key != HEAD and key.expert == DENSE else layout
        assert layout is not None
        with memory.fill(key) as shard:
            for placed in layout.matrices:
                matrix = placed.layout
                known = (matrix.format, matrix.order, matrix.shape)
                if known not in packed:
                    packed[known] = _packed(matrix, noise)
                shard[placed.offset : placed.end].copy_(packed[known])


def _packed(layout: Layout, noise: torch.Tensor) -> torch.Tensor:
    """A matrix that keeps the scale of its inputs: all of one shape are the same, at addresses of their own."""
    count = layout.shape[0] * layout.shape[1]
    weight = noise.repeat(-(-count // len(noise)))[:count].view(layout.shape) * layout.shape[1] ** -0.5
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    pack_into(weight.to(torch_dtype(layout.dtype)), layout, buffer)
    return buffer
