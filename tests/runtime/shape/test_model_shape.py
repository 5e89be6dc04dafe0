"""A ModelShape read without torch agrees with the model that transformers builds."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.runtime.model.definition import LayerAssembly, define, stock_tensor_shapes
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings import errors
from moedge.runtime.settings.errors import OldTransformers, UnsupportedModel
from moedge.runtime.settings.settings import MemoryBudget
from moedge.runtime.shape import families
from moedge.runtime.shape.checkpoint_shape import open_checkpoint, read_shape
from moedge.runtime.shape.config import TWO_CALLS, ModelConfig, kv_heads, window
from moedge.runtime.shape.families import INDEXED, MOE, SINCE, SUPPORTED
from moedge.runtime.shape.formula import is_worked_out, shape_of_config
from moedge.runtime.shape.model_shape import KVGroup, ModelShape, shape_from_json
from moedge.runtime.shape.read import is_convolution, model_shape
from moedge.runtime.shape.shards import all_formats, checkpoint_nbytes, model_shards
from support.defaults_table import rebuild
from support.installed_transformers import NEWEST, installed, needs_transformers
from support.known_shapes import QUANTIZATION, published_shape
from support.quantized_checkpoints import FORMATS, write_quantized
from support.tiny_families import FEATURES, build_model, stored_numel, tiny_config


def read(folder: Path) -> ModelShape:
    config = ModelConfig.read(folder)
    with open_checkpoint(config, folder) as files:
        return model_shape(config, files.entries)


# Experts of every kind, latents, indexers and states; `make matrix` runs every family.
@pytest.mark.sample(*FEATURES, *INDEXED, "deepseek_v3", "kimi_linear", "qwen3_next", "falcon_h1", "jamba", "lfm2_moe")
@pytest.mark.parametrize("family", installed(SUPPORTED))
def test_shape_agrees_with_the_stock_model(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    model.save_pretrained(tmp_path)
    shape = read(tmp_path)
    assert shape.parameters == stored_numel(model)
    assert (shape.head is None) == getattr(model.config, "tie_word_embeddings", False)
    # The definition that will be filled, with what llama4 needs.
    defined = define(ModelConfig.read(tmp_path), torch.float32)
    layers = defined.get_decoder().layers
    assert len(shape.layers) == len(layers)
    for ours, theirs in zip(shape.layers, layers, strict=True):
        LayerAssembly(theirs, model_shards(shape, "none", "fp32").layers[ours.index], ParallelMatmul(Workspace(0)))
        stacked = [p for name, p in theirs.named_parameters() if p.dim() == 3 and not is_convolution(name)]
        assert (ours.experts is None) == (not stacked)
        if ours.experts:
            assert ours.experts.count == stacked[0].shape[0]
            assert ours.experts.count * ours.experts.numel == sum(p.numel() for p in stacked)
            experts = next(module for module in theirs.modules() if hasattr(module, "is_transposed"))
            assert experts.is_transposed == ModelConfig.read(tmp_path).family.transposed_experts
    assert {layer.experts.per_token for layer in shape.layers if layer.experts} <= {2}
    assert (shape.num_experts > 0) == (family in MOE)
    check_heads(shape, layers)
    check_states(shape, layers)
    # A plan without weights: the same from config.json alone.
    config = ModelConfig.read(tmp_path)
    shapes = None if is_worked_out(config) else stock_tensor_shapes(config)
    assert shape_of_config(config, "float32", shapes) == shape


# Scales in another dtype than the model's: published ones of this method are in the model's.
SCALED_OTHERWISE = {"ct int4 g32 bf16", "ct int4 g64 fp16 asym", "ct int8 g128 bf16"}


@pytest.mark.parametrize("form", sorted({*FORMATS, "mxfp4"} - {"ct mixed", *SCALED_OTHERWISE}))
def test_shapes_of_quantized_checkpoints_are_worked_out_from_their_config(form: str, tmp_path: Path) -> None:
    write_quantized(form, tmp_path / "packed", tmp_path / "wide", "gpt_oss" if form == "mxfp4" else "qwen3_moe")
    config = ModelConfig.read(tmp_path / "packed")
    with Checkpoint(tmp_path / "packed") as files:
        wanted = read_shape(tmp_path / "packed")
        nbytes = sum(entry.nbytes for entry in files.entries.values())
    found = shape_of_config(config, "float32")
    assert replace(found, stored=(), widened_nbytes=0, dtype="") == replace(
        wanted, stored=(), widened_nbytes=0, dtype=""
    )
    assert checkpoint_nbytes(found) == pytest.approx(nbytes, rel=0.02)
    assert all_formats(found) == all_formats(wanted)


# Bytes of published files: openai/gpt-oss-20b and -120b, Qwen/Qwen3-30B-A3B-FP8 and -GPTQ-Int4, and Mixtral-8x7B in
# AWQ. DeepSeek-V3 has 671 B parameters in bytes, beside those of a layer that predicts another token.
PUBLISHED = {
    "gpt-oss-20b": 13.76e9, "gpt-oss-120b": 65.2e9, "Qwen3-30B-A3B-FP8": 31.1e9, "Qwen3-30B-A3B-GPTQ-Int4": 16.9e9,
    "Mixtral-8x7B-AWQ": 24.7e9, "DeepSeek-V3": 674e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_quantized_models_are_planned_from_config_alone(name: str) -> None:
    """With the bytes of their files, and with their own codes where a weight format has them."""
    shape, nbytes = published_shape(name), PUBLISHED[name]
    assert checkpoint_nbytes(shape) == pytest.approx(nbytes, rel=0.01)
    costs = CostModel(shape, rates_of(None, on_device=False))
    plan = solve(PlanRequest(costs=costs, workload=Workload(64, 64), budget=MemoryBudget(128 << 30))).plan
    assert plan.weights_nbytes < 1.1 * nbytes or QUANTIZATION[name]["quant_method"] == "fp8"


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "qwen3_moe", "qwen3_next"])
def test_shapes_worked_out_from_a_config_are_those_of_the_files(family: str, checkpoint: Callable[[str], Path]) -> None:
    found, wanted = shape_of_config(ModelConfig.read(checkpoint(family)), "float32"), read(checkpoint(family))
    assert found == wanted
    unpacked = [matrix.name for layer in wanted.layers for matrix in layer.dense if matrix.unpacked]
    assert unpacked == (["self_attn.kv_b_proj"] * len(wanted.layers) if wanted.kv_groups[0].is_latent else [])


def test_a_checkpoint_that_calls_itself_kimi_k2_is_deepseek_v3(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "kimi")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "kimi_k2"}))
    assert read(folder) == read(checkpoint("deepseek_v3"))


@pytest.mark.parametrize("family", installed(sorted(INDEXED)))
def test_an_indexer_has_keys_of_its_own(family: str, checkpoint: Callable[[str], Path]) -> None:
    shape = read(checkpoint(family))
    layers = (0, 2) if family in {"dots3_note_text", "glm_moe_dsa"} else (0, 1, 2, 3)
    *latents, indexers = shape.kv_groups
    assert sorted(layer for group in latents for layer in group.layers) == [0, 1, 2, 3]
    assert indexers == KVGroup(layers, 1, 32, None, chosen=24)
    assert shape.context == tiny_config(family).max_position_embeddings
    assert shape_from_json(json.loads(json.dumps(asdict(shape)))) == shape
    unpacked = {matrix.name for layer in shape.layers for matrix in layer.dense if matrix.unpacked}
    assert unpacked == {"self_attn.kv_b_proj", "self_attn.indexer.weights_proj"}


@needs_transformers("5.23")
def test_layers_that_slide_have_latents_of_their_own(checkpoint: Callable[[str], Path]) -> None:
    found = [
        (group.layers, group.head_dim, group.query_heads, group.window)
        for group in read(checkpoint("dots3_note_text")).kv_groups
        if group.is_latent
    ]
    assert found == [((0, 2), 48, 4, None), ((1, 3), 32, 2, 16)]


@pytest.mark.parametrize(
    "fields", [{"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_pattern": "FSSF"}, {}]
)
def test_which_layers_have_an_indexer_is_what_transformers_says(fields: dict[str, Any]) -> None:
    values = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, **fields}
    wanted = CONFIG_MAPPING["glm_moe_dsa"](num_hidden_layers=4, **fields).indexer_types
    assert (ModelConfig(values).get("indexer_types") or ["full"] * 4) == wanted


def test_layers_of_kimi_linear_count_from_1_in_its_files() -> None:
    inner = {"full_attn_layers": [2, 4], "kda_layers": [1, 3, 5], "head_dim": 16, "num_heads": 6}
    inner["short_conv_kernel_size"] = 3
    config = ModelConfig({"model_type": "kimi_linear", "num_hidden_layers": 5, "linear_attn_config": inner})
    wanted = CONFIG_MAPPING["kimi_linear"](num_hidden_layers=5, linear_attn_config=inner)
    assert config.get("layer_types") == wanted.layer_types
    found = [config.get(name) for name in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")]
    assert found == [wanted.linear_head_dim, wanted.linear_num_heads, wanted.linear_conv_kernel_dim] == [16, 6, 3]


def test_the_lists_of_step_3_5_are_those_of_its_layers() -> None:
    """Files have entries for layers that predict further tokens, too, and rotary settings for every layer."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    values = {
        "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "layer_types": kinds, "moe_layers_enum": "2,3,4",
        "num_attention_groups": 4, "num_attention_heads": 8, "head_dim": 16, "moe_num_experts": 12, "moe_top_k": 3,
        "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
        "attention_other_setting": {"num_attention_heads": 12}, "swiglu_limits": [0.0, 0.0, 7.0, 0.0, 0.0],
        "sliding_window": 64, "rope_scaling": None,
    }  # fmt: skip
    found = ModelConfig({"model_type": "step3p5", **copy.deepcopy(values)})
    theirs = CONFIG_MAPPING["step3p7"](text_config=values).text_config
    for name in ("layer_types", "mlp_layer_types", "num_sliding_attention_heads", "swiglu_limits", "rope_parameters"):
        assert found.get(name) == getattr(theirs, name), name
    assert (found.num_experts, found.experts_per_token, kv_heads(found, 1)) == (12, 3, 4)
    assert [window(found, layer) for layer in range(4)] == [None, 64, 64, None]
    again = CONFIG_MAPPING["step3p7"](text_config={**found.values}).text_config
    predicting = {"mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"}
    assert {k: v for k, v in again.to_dict().items() if k not in predicting} == {
        k: v for k, v in theirs.to_dict().items() if k not in predicting
    }


@pytest.mark.parametrize("name", SINCE)
def test_a_family_that_the_installed_transformers_lacks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "version", lambda package: "5.17.0")
    with pytest.raises(
        OldTransformers, match=f"model type '{name}' needs transformers {SINCE[name]} or newer, and 5.17"
    ):
        ModelConfig({"model_type": name})
    # Releases are compared as numbers: 5.9 is older than 5.18.
    monkeypatch.setattr(errors, "version", lambda package: "5.9")
    with pytest.raises(OldTransformers):
        ModelConfig({"model_type": name})
    monkeypatch.setattr(errors, "version", lambda package: SINCE[name])
    assert families.family(name).model_type == name


def test_the_families_that_a_transformers_lacks_are_those_of_the_table() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = Version(version("transformers"))
    assert {name for name in SUPPORTED if name not in CONFIG_MAPPING} <= {
        name for name, since in SINCE.items() if found < Version(since)
    }


def test_a_transformers_that_expands_before_it_caches_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    monkeypatch.delattr(DeepseekV3Attention, "expand_kv")
    with pytest.raises(UnsupportedModel, match="caches what it expands from the latents of deepseek_v3"):
        define(ModelConfig.read(checkpoint("deepseek_v3")), torch.float32)


def check_heads(shape: ModelShape, layers: Any) -> None:
    modules = [
        one for layer in layers for one in layer.modules() if hasattr(one, "expand_kv") or hasattr(one, "indexer")
    ]
    for group in shape.kv_groups:
        if group.is_latent:
            own = [one for one in modules if one.layer_idx in group.layers]
            assert [one.layer_idx for one in own] == list(group.layers)
            sizes = {(one.kv_lora_rank, one.qk_rope_head_dim, one.num_heads) for one in own}
            assert sizes == {(group.head_dim, group.rope_dim, group.query_heads)}
            continue
        if group.is_index:
            indexers = [one for layer in layers for one in layer.modules() if "Indexer" in type(one).__name__]
            assert [one.layer_idx for one in indexers] == list(group.layers)
            assert set(map(chosen_by, indexers)) == {(group.head_dim, group.chosen)}
            continue
        for index in group.layers:
            layer = layers[index // (2 if shape.model_type in TWO_CALLS else 1)]
            attention = getattr(getattr(layer, "shared_transformer", layer), "self_attn", None) or layer.mixer
            assert group.head_dim == max(attention.head_dim, getattr(attention, "v_head_dim", 0))
            if isinstance(getattr(attention, "k_proj", None), nn.Linear):
                assert group.kv_heads * attention.head_dim == attention.k_proj.out_features


def chosen_by(indexer: Any) -> tuple[int, int]:
    """Elements of an indexer's key, and the most tokens that a token then attends to."""
    if hasattr(indexer, "compress_ratio"):
        return indexer.index_head_dim, indexer.token_budget + indexer.compress_ratio - 1
    if hasattr(indexer, "topk_blocks"):
        return indexer.head_dim, indexer.topk_blocks * indexer.block_size
    return indexer.head_dim, indexer.index_topk


def check_states(shape: ModelShape, layers: Any) -> None:
    """Channels, tokens and states, by what the modules say of themselves."""
    found = [one for layer in layers for one in layer.modules() if is_recurrent(one)]
    # The second convolution of a layer is numbered behind all layers.
    mixers = {one.layer_idx + len(layers) * hasattr(one, "short_conv_state_len"): one for one in found}
    assert sorted(mixers) == sorted(layer for group in shape.state_groups for layer in group.layers)
    for group in shape.state_groups:
        for index in group.layers:
            mixer = mixers[index]
            kernels = [child for child in mixer.children() if isinstance(child, nn.Conv1d)]
            sizes = ((one.in_channels, (one.kernel_size[0] - 1) * one.dilation[0]) for one in kernels)
            assert group.conv == tuple(n for size in sizes for n in size)
            if hasattr(mixer, "slope_rate"):
                assert group.recurrent == (mixer.num_attention_heads, mixer.head_dim, mixer.head_dim)
            elif hasattr(mixer, "forget_gate"):
                assert group.recurrent == (mixer.num_heads, mixer.head_dim, mixer.head_dim)
            elif hasattr(mixer, "head_k_dim"):
                assert group.recurrent == (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
            elif hasattr(mixer, "num_heads"):
                assert group.recurrent == (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
            elif hasattr(mixer, "ssm_state_size"):
                assert group.recurrent == (mixer.intermediate_size, mixer.ssm_state_size)
            else:
                assert group.recurrent == ()


def is_recurrent(module: nn.Module) -> bool:
    return hasattr(module, "slope_rate") or any(isinstance(child, nn.Conv1d) for child in module.children())


def test_windows_of_configs_without_layer_types() -> None:
    """Each rule, against transformers' own layer_types."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from moedge.runtime.shape.read import kv_groups

    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt_oss", {"num_hidden_layers": 5}),
        ("gemma3_text", {"num_hidden_layers": 13, "sliding_window": 77}),
        ("qwen3", {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}),
        ("qwen3", {"num_hidden_layers": 6, "use_sliding_window": False, "sliding_window": 9, "max_window_layers": 4}),
    ]
    for family, settings in cases:
        theirs = CONFIG_MAPPING[family](**settings)
        windows = {
            layer: group.window
            for group in kv_groups(ModelConfig({"model_type": family, **settings}))
            for layer in group.layers
        }
        wanted = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert [windows[layer] for layer in range(settings["num_hidden_layers"])] == wanted, (family, settings)


@needs_transformers(NEWEST)
def test_the_generated_defaults_are_current() -> None:
    import moedge.runtime.shape as package

    stored = json.loads((Path(package.__path__[0]) / "defaults.json").read_text())
    assert stored == json.loads(json.dumps(rebuild()))


def test_reading_a_shape_imports_no_torch(checkpoint: Callable[[str], Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from moedge.offload.checkpoint.checkpoint import Checkpoint;"
        "from moedge.runtime.shape.config import ModelConfig; from moedge.runtime.shape.read import model_shape;"
        f"folder = Path({str(checkpoint('gpt_oss'))!r});"
        "model_shape(ModelConfig.read(folder), Checkpoint(folder).entries); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "glm5_next_text"}, "sparse attention"),
        ({"model_type": "mamba2"}, "recurrent"),
        ({"model_type": "no_such_model"}, "not supported"),
        ({"model_type": 7}, "not supported"),
        ({"nested": {"auto_map": {"AutoModel": "evil.Model"}}}, "names code"),
        ({"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil_moe"}, "'evil_moe' is not supported.*never run"),
        ({"_attn_implementation": "evil/kernel"}, "private"),
        ({"nested": {"deep": {"attn_implementation": "x/y"}}}, "names code"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"num_local_experts": "8"}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm', which is not read"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 5}, "5 layers"),
    ],
)
def test_hostile_and_unknown_configs_are_refused(
    change: dict[str, Any], says: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("gpt_oss"), tmp_path / "copy")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises(UnsupportedModel, match=says):
        read(folder)
