"""What llama.cpp's converter made of a checkpoint of each family is read as that checkpoint: its configuration, and
every tensor by name, shape and numbers. `make matrix` writes down what it made, in tests/support/gguf_records.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.definition import stock_tensor_shapes
from moedge.runtime.model.dequantize import dequantize, read_rows
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import read_config, read_shape, read_tensors
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.gguf_architectures import ARCHITECTURES
from support.gguf_converted import FAMILIES, family_of, filled, places, record_of
from support.gguf_files import blocks_of

pytestmark = pytest.mark.numerics

# Those that this release of transformers has.
RECORDED = [case for case in FAMILIES if family_of(case) in CONFIG_MAPPING]
# Fields of a configuration that no file has and that change no token, and lengths that the converter replaces where
# positions are not rotated. A family that is another's file is read as the other.
UNSAID = {
    "max_position_embeddings", "mamba_chunk_size", "chunk_size", "num_nextn_predict_layers", "max_window_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "sep_token_id",
}  # fmt: skip
UNUSED = {
    "youtu": {"rope_interleave", "model_type"},
    # What decides where layers are listed, or no layer slides.
    "dots1": {"sliding_window"}, "jamba": {"attn_layer_period"}, "nemotron_h": {"sliding_window"},
    # The file has their product, and how many layers come before those with experts.
    "lfm2": {"intermediate_size", "block_auto_adjust_ff_dim"}, "glm4_moe_lite": {"mlp_layer_types", "model_type"},
}  # fmt: skip
READ_AS = {"glm4_moe_lite": "deepseek_v3", "youtu": "deepseek_v2"}


def recorded(family: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(record_of(family).read_text())
    return record


def add_values(writer: Any, metadata: Mapping[str, Any]) -> None:
    kinds = {bool: "bool", int: "int32", float: "float32", str: "string", list: "array"}
    for key, value in metadata.items():
        if key != "general.architecture":
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def write(path: Path, record: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> Path:
    """A file of the record's metadata with tensors in types of gguf's."""
    writer = gguf.GGUFWriter(path, record["metadata"]["general.architecture"])
    add_values(writer, record["metadata"])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sampled(record: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, str]]:
    """The record's tensors with the numbers that it has of them, and NaN elsewhere."""
    found = {}
    for name, (shape, numbers) in record["tensors"].items():
        data = torch.full(tuple(shape), torch.nan).flatten()
        data[slice(None) if len(numbers) == len(data) else places(name, len(data))] = torch.tensor(numbers)
        found[name] = data.view(tuple(shape)).numpy(), "F32"
    return found


def weights_of(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = read_config(path)
    with GgufCheckpoint(path) as files:
        weights = read_tensors(config, files).quantized
        return config, {name: dequantize(files, weight, torch.float32).float() for name, weight in weights.items()}


def fields(config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = CONFIG_MAPPING[config.family.model_type](**config.values).to_dict()
    return found


def is_close(one: Any, other: Any) -> bool:
    """Whether values are the same but for what a float of 32 bits loses."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(is_close(one.get(key), other.get(key)) for key in {*one, *other})
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-6)
    return bool(one == other)


@pytest.mark.parametrize("family", RECORDED)
def test_a_converted_file_is_read_as_the_checkpoint(family: str, tmp_path: Path) -> None:
    record = recorded(family)
    config, weights = weights_of(write(tmp_path / "model.gguf", record, sampled(record)))
    wanted = ModelConfig(record["config"])
    assert config.family.model_type == READ_AS.get(family, family_of(family))
    ours, theirs = fields(config), fields(wanted)
    said = wanted.values.keys() - UNSAID - UNUSED.get(family_of(family), set())
    both = {name: (ours.get(name), theirs.get(name)) for name in said}
    assert not {name: values for name, values in both.items() if not is_close(*values)}
    shapes = stock_tensor_shapes(wanted)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    shown = 0
    for name, weight in weights.items():
        known = ~weight.isnan()
        shown += int(known.sum())
        assert torch.allclose(weight[known], filled(name, shapes[name])[known], rtol=1e-3, atol=1e-4), name
    assert shown > len(record["tensors"])


@pytest.mark.parametrize("family", RECORDED)
def test_blocks_mean_what_their_floats_mean(family: str, tmp_path: Path) -> None:
    """Rows and columns of codes are put in the same order as those of floats, as they are and widened."""
    record, floats, blocks = recorded(family), {}, {}
    generator = np.random.default_rng(7)
    for name, (shape, numbers) in record["tensors"].items():
        own = _kind(name, shape)
        data = generator.random(shape, np.float32) - (1 if name.endswith("ssm_a") else 0)
        data = np.array(numbers, np.float32) if name == "rope_freqs.weight" else data
        packed = data if own == "F32" else blocks_of(data, gguf.GGMLQuantizationType[own])
        blocks[name] = packed, own
        floats[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[own]).reshape(shape), "F32"
    _, wanted = weights_of(write(tmp_path / "floats.gguf", record, floats))
    path = write(tmp_path / "blocks.gguf", record, blocks)
    _, found = weights_of(path)
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    with GgufCheckpoint(path) as files:
        weights = read_tensors(read_config(path), files).quantized
        kept = [weight for weight in weights.values() if weight.kept and len(weight.entry.shape) == 2]
        for weight in kept[:: max(1, len(kept) // 20)]:
            rows = read_rows(files, weight)
            codes = rows[:, : weight.entry.shape[1]].view(torch.int8).view(len(rows), -1, 32)
            scales = rows[:, weight.entry.shape[1] :].contiguous().view(torch.float16)
            assert torch.equal((codes * scales[..., None].float()).flatten(1), wanted[weight.entry.name])
    assert kept


def _kind(name: str, shape: list[int]) -> str:
    """Matrices of whole blocks; the converter leaves routers and convolutions as floats."""
    apart = ("ffn_gate_inp", "conv", "ssm_a", "ssm_d", "norm", "exp_probs_b", ".bias", "rope_freqs", "token_embd")
    return "F32" if len(shape) < 2 or shape[-1] % 32 or any(part in name for part in apart) else "Q8_0"


def test_gate_and_up_in_one_tensor_are_the_same_as_in_two(tmp_path: Path) -> None:
    record = recorded("qwen3_moe")
    tensors = sampled(record)
    both = {
        name.replace("gate_exps", "gate_up_exps"): (
            np.concatenate([data, tensors[name.replace("gate", "up")][0]], 1), kind
        )
        for name, (data, kind) in tensors.items() if "ffn_gate_exps" in name
    }  # fmt: skip
    rest = {name: each for name, each in tensors.items() if "gate_exps" not in name and "up_exps" not in name}
    _, wanted = weights_of(write(tmp_path / "two.gguf", record, tensors))
    _, found = weights_of(write(tmp_path / "one.gguf", record, rest | both))
    assert {name: weight.shape for name, weight in found.items()} == {name: each.shape for name, each in wanted.items()}
    assert all(torch.equal(found[name].nan_to_num(9), each.nan_to_num(9)) for name, each in wanted.items())


@pytest.mark.parametrize(
    ("family", "removed", "message"),
    [
        ("qwen3_next", "blk.0.attn_gate.weight", "attn_gate.weight' is missing"),
        ("qwen3_next", "blk.0.attn_qkv.weight", "attn_qkv.weight is missing"),
        ("deepseek_v3", "blk.1.attn_v_b.weight", "attn_v_b.weight' is missing"),
        ("gpt_oss", "blk.2.ffn_gate_exps.bias", "ffn_gate_exps.bias is missing"),
    ],
)
def test_a_part_of_a_weight_that_is_missing_is_named(family: str, removed: str, message: str, tmp_path: Path) -> None:
    record = recorded(family)
    tensors = {name: each for name, each in sampled(record).items() if name != removed}
    with pytest.raises(BadCheckpoint, match=message):
        read_shape(write(tmp_path / "model.gguf", record, tensors))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_5_moe_text", "qwen35moe.ssm.group_count", 5),
        ("qwen3_5_moe_text", "qwen35moe.ssm.state_size", 1 << 30),
        ("qwen3_next", "qwen3next.ssm.inner_size", 0),
        ("deepseek_v3", "deepseek2.attention.value_length_mla", 1000),
        ("deepseek_v3", "deepseek2.rope.dimension_count", 1 << 30),
        ("gemma4_text", "gemma4.attention.head_count_kv", [2]),
        ("gemma4_text", "gemma4.block_count", 0),
        ("glm4_moe", "glm4moe.nextn_predict_layers", 100),
        ("glm4_moe", "glm4moe.rope.dimension_count", 0),
        ("jamba", "jamba.ssm.inner_size", 1 << 30),
        ("lfm2", "lfm2.block_count", 1 << 30),
        ("nemotron_h", "nemotron_h_moe.ssm.time_step_rank", 0),
    ],
)
def test_values_that_contradict_tensors_are_refused_in_a_sentence(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    record = recorded(family)
    record["metadata"][key] = value
    with pytest.raises((BadCheckpoint, UnsupportedModel)):
        read_shape(write(tmp_path / "model.gguf", record, sampled(record)))


def test_queries_keys_values_and_gates_in_one_tensor_of_old_files_are_read(tmp_path: Path) -> None:
    record = recorded("qwen3_next")
    tensors = sampled(record)
    rows = sum(len(tensors.pop(f"blk.0.{part}.weight")[0]) for part in ("attn_qkv", "attn_gate"))
    wanted = filled("old", (rows, record["config"]["hidden_size"]))
    _, weights = weights_of(
        write(tmp_path / "old.gguf", record, tensors | {"blk.0.ssm_in.weight": (wanted.numpy(), "F32")})
    )
    assert torch.equal(weights["model.layers.0.linear_attn.in_proj_qkvz.weight"], wanted)


def test_every_architecture_is_recorded() -> None:
    assert {recorded(family)["metadata"]["general.architecture"] for family in FAMILIES} == set(ARCHITECTURES)
