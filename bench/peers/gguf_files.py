"""GGUF files of Qwen3 mixtures of experts, for llama.cpp: bf16 by gguf's writer, others by llama-quantize.

    python -m bench.peers.gguf_files models/q24 IQ3_S --llama-bin LLAMA_BIN     # one layer, repeated

Names and layouts are those of llama.cpp's converter, which cannot be asked itself: it knows tokenizers by their hashes,
and those of bench.make_model are its own.

llama-quantize takes hours for a mixture of 31 GB in formats with codebooks. What the command above writes is for speed
alone: the first layer's quantized tensors stand for those of every layer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHITECTURE = "qwen3moe"
NORMAL, CONTROL = 1, 3
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def gguf_of(model: Path, kind: str, binaries: Path, imatrix: Path | None = None) -> Path:
    """The file of `kind` beside the model, `m-Q4_0.gguf`, written where it is missing. Raises SystemExit."""
    file = model.parent / f"{model.name}-{kind}.gguf"
    if file.exists():
        return file
    # Under its own name only once it is whole.
    unfinished = file.with_suffix(".new")
    if kind == "bf16":
        write(model, unfinished)
    else:
        options = ["--imatrix", str(imatrix)] if imatrix else []
        files = [str(gguf_of(model, "bf16", binaries)), str(unfinished)]
        command = [str(binaries / "llama-quantize"), *options, *files, kind, "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise SystemExit(f"llama-quantize ended with {done.returncode}: {said}")
    return unfinished.rename(file)


def with_one_layer(model: Path) -> Path:
    """A folder beside the model that is its first layer, without a copy of its weights."""
    folder = model.parent / f"{model.name}-one"
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


def repeat_layer(one: Path, layers: int, path: Path) -> None:
    """Writes the file `one` of a single layer with that layer's tensors `layers` times."""
    import gguf

    reader = gguf.GGUFReader(one)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    count = f"{ARCHITECTURE}.block_count"
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", count):
            continue
        kinds = list(field.types)
        inner = kinds[-1] if kinds[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kinds[0], inner)
    writer.add_block_count(layers)
    tensors = [
        (tensor.name.replace("blk.0.", f"blk.{layer}."), tensor)
        for tensor in reader.tensors
        for layer in range(layers if tensor.name.startswith("blk.0.") else 1)
    ]
    for name, tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def write(model: Path, path: Path) -> None:
    """The checkpoint in bf16, tensor by tensor; what is not multiplied as a matrix, and routers, in float32."""
    import gguf
    import torch

    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3_moe":
        raise SystemExit(f"{model} is a {config['model_type']}; GGUF files are written of qwen3_moe alone")
    files, writer = Checkpoint(model), gguf.GGUFWriter(path, ARCHITECTURE)
    _metadata(writer, config)
    _vocabulary(writer, model, config["eos_token_id"])
    names = list(_names(config))
    kinds, types = (torch.bfloat16, torch.float32), gguf.GGMLQuantizationType
    for name, sources in names:
        shape = ([len(sources)] if len(sources) > 1 else []) + files.shape(sources[0])
        dtype = kinds[len(shape) == 1 or "ffn_gate_inp" in name]
        nbytes = [*shape[:-1], shape[-1] * dtype.itemsize]
        raw = types.BF16 if dtype is torch.bfloat16 else types.F32
        size = torch.Size(nbytes).numel()
        writer.add_tensor_info(name, nbytes, _uint8(), size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, sources in names:
        tensors = [files.read(one) for one in sources]
        whole = torch.stack(tensors) if len(tensors) > 1 else tensors[0]
        if whole.dim() == 1 or "ffn_gate_inp" in name:
            whole = whole.float()
        writer.write_tensor_data(whole.contiguous().view(torch.uint8).numpy())
    writer.close()


def _uint8() -> Any:
    import numpy as np

    return np.dtype(np.uint8)


class Checkpoint:
    """Tensors of a folder of safetensors files by name."""

    def __init__(self, folder: Path) -> None:
        self._folder, index = folder, folder / "model.safetensors.index.json"
        self._files = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return safe_open(self._folder / self._files.get(name, "model.safetensors"), framework="pt")

    def shape(self, name: str) -> list[int]:
        with self._open(name) as file:
            return list(file.get_slice(name).get_shape())

    def read(self, name: str) -> Any:
        with self._open(name) as file:
            return file.get_tensor(name)


def _names(config: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each tensor of the file, and those of the checkpoint that it is made of: experts are one tensor."""
    for own, module in OUTER.items():
        if own != "output" or not config.get("tie_word_embeddings"):
            yield f"{own}.weight", [f"{module}.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for own, module in PARTS.items():
            yield f"blk.{layer}.{own}.weight", [f"{prefix}.{module}.weight"]
        for own, module in EXPERTS.items():
            experts = range(num_experts(config))
            yield f"blk.{layer}.{own}.weight", [f"{prefix}.mlp.experts.{one}.{module}.weight" for one in experts]


def num_experts(config: dict[str, Any]) -> int:
    count: int = config.get("num_experts") or config["num_local_experts"]
    return count


def _metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    # The defaults of Qwen3MoeConfig.
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(config.get("rope_parameters", config).get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(num_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])


def _vocabulary(writer: Any, model: Path, eos: int) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {one["content"]: one["id"] for one in content["added_tokens"]}
    special = {one["content"] for one in content["added_tokens"] if one["special"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]])
    writer.add_eos_token_id(eos)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("kind", help="a format of llama-quantize")
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--imatrix", type=Path, help="what llama-imatrix wrote of the layer; some formats want it")
    options = parser.parse_args()
    one = gguf_of(with_one_layer(options.model), options.kind, options.llama_bin, options.imatrix)
    layers = json.loads((options.model / "config.json").read_text())["num_hidden_layers"]
    path = options.model.parent / f"{options.model.name}-{options.kind}.gguf"
    repeat_layer(one, layers, path)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
