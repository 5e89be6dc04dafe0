"""Takes the weights of a Llama off a grid: the residual stream is rotated, and no logit changes (bench.rotate)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.real.smollm2 import cache, smollm2

SEED = 0
NAME = "SmolLM2-135M-Instruct-rotated"
TITLE = "SmolLM2-135M-Instruct, rotated (on no grid)"


def orthogonal(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float64: Q of the QR decomposition of normal numbers, its signs made unique."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def load() -> Any:
    """The original in float32, as transformers reads its file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(unpacked(), dtype=torch.float32).eval()


@torch.no_grad()
def rotate(model: Any, seed: int = SEED) -> None:
    """Turns the residual stream of a Llama in place; its logits stay what they were but for rounding."""
    turn = orthogonal(model.config.hidden_size, seed)
    embedding = model.model.embed_tokens.weight
    _set(model.lm_head, _read(embedding, model.model.norm, turn))
    _set(model.model.embed_tokens, embedding.double() @ turn)
    model.config.tie_word_embeddings = False
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for linear in readers:
                _set(linear, _read(linear.weight, norm, turn))
            norm.weight.fill_(1)
        for linear in (attention.o_proj, mlp.down_proj):
            _set(linear, turn.T @ linear.weight.double())
    model.model.norm.weight.fill_(1)


def _read(weight: Tensor, norm: nn.Module, turn: Tensor) -> Tensor:
    """What a matrix becomes that reads the normed stream."""
    return (weight.double() * norm.weight.double()) @ turn


def _set(module: nn.Module, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight.float(), requires_grad=False)


def unpacked() -> Path:
    """The folder of the original in float32, written where it is missing: a GGUF file takes transformers half a minute
    of the processor, and many tests ask for the model."""
    return _written("SmolLM2-135M-Instruct-float32", _read_gguf)


def _read_gguf() -> Any:
    from transformers import AutoModelForCausalLM

    file = smollm2()
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers saves no model that it read from a GGUF file.
    for name in ("quantization_config", "_model_name_or_path"):
        vars(read.config).pop(name, None)
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    return model


def rotated(seed: int = SEED) -> Path:
    """The folder of the rotated checkpoint in bf16, written where it is missing."""

    def make() -> Any:
        model = load()
        rotate(model, seed)
        return model.to(torch.bfloat16)

    return _written(f"{NAME}-{seed}", make)


def shallow() -> Path:
    """The folder of the model's first two layers in bf16, with its embedding and norms, written where it is missing."""

    def make() -> Any:
        model = load()
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        return model.to(torch.bfloat16)

    return _written("SmolLM2-135M-Instruct-2-layers", make)


def _written(name: str, make: Callable[[], Any]) -> Path:
    from transformers import AutoTokenizer

    folder = cache() / name
    if folder.exists():
        return folder
    # Two processes may write it at once; the first one's stays.
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        unfinished = Path(scratch) / name
        make().save_pretrained(unfinished)
        file = smollm2()
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
        if not folder.exists():
            unfinished.rename(folder)
    return folder


def write_gguf(folder: Path, file: Path) -> Path:
    """The rotated checkpoint as a GGUF file in bf16 for llama.cpp, with the vocabulary of the file it was made of."""
    import gguf
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    reader = gguf.GGUFReader(smollm2())
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            item = field.types[1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, item)
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, reader.fields["llama.block_count"].contents())
    for name, tensor in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight",))
        for part, count in heads.items():
            if f".{part}." in own:
                # llama.cpp turns neighbouring numbers, transformers those half a head apart.
                number = reader.fields[f"llama.{count}"].contents()
                tensor = tensor.unflatten(0, (number, 2, -1)).transpose(1, 2).flatten(0, 2)
        flat = tensor.dim() == 1
        data = (tensor.float() if flat else tensor.contiguous().view(torch.uint8)).numpy()
        writer.add_tensor(own, data, raw_dtype=None if flat else gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
