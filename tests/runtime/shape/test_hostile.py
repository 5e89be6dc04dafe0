"""config.json as hostile text (`runtime/shape/config.py`, `runtime/shape/config_fields.py`): what is not in the
allow-list never reaches a model, what is must be in its range.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.definition import define
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.config import MAX_CONFIG_NBYTES, RENAMED, ModelConfig
from moedge.runtime.shape.config_fields import FIELDS, LISTS, NESTED, ROPE_FIELDS, AutoOr, Choice, Rule
from moedge.runtime.shape.families import SUPPORTED
from support.installed_transformers import installed
from support.tiny_families import FEATURES

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "pad_token_id": None,
    "num_experts_per_tok": 1, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 16,
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
# Fields of transformers' configurations that cannot change a pass without gradients, or that moedge decides.
INERT = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "attention_dropout", "chunk_size_feed_forward",
    "dtype", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "transformers_version", "use_cache", "embd_pdrop",
    "embedding_dropout", "hidden_dropout", "input_jitter_noise", "mtp_layer_types", "mtp_mlp_layer_types",
    "resid_pdrop", "residual_dropout", "embedding_initializer_range", "num_logits_to_keep", "z_loss_coefficient",
    "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
    "time_step_floor", "time_step_max", "rescale_prenorm_residual", "residual_in_fp32", "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap", "mtp_layers_block_type", "use_associative_scan", "use_mamba_kernels", "use_mambapy",
    # Follow from other fields, which transformers' classes compare.
    "expand", "mamba_d_head", "attention_head_dim", "attention_hidden_size", "hybrid_layer_ids", "kv_channels",
    "mamba_headdim", "num_query_groups", "number_of_conv_states",
    # Of training.
    "lambda_std_dev", "use_mem_eff_path",
    "mtp_loss_scaling_factor",
    # Any other than the default is refused.
    "time_step_limit",
    # Of classes that answer with a label.
    "pooling",
}  # fmt: skip


@pytest.mark.parametrize("family", installed(SUPPORTED))
def test_every_field_of_a_family_is_read_or_known_to_be_inert(family: str) -> None:
    """The day this fails, transformers has a new field: read it with a range, or say here why not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {RENAMED.get(family, {}).get(name, name) for name in CONFIG_MAPPING[family]().to_dict()}
    assert found <= {"model_type", *FIELDS, *LISTS, *NESTED, *ROPE_FIELDS, *INERT}


def in_range(rule: Rule) -> st.SearchStrategy[Any]:
    if isinstance(rule, AutoOr):
        return st.just("auto") | in_range(rule.number)
    if isinstance(rule, Choice):
        return st.sampled_from(rule.values)
    if rule.whole:
        return st.integers(int(rule.least), int(rule.most))
    return st.floats(rule.least, rule.most) | st.integers(math.ceil(rule.least), int(rule.most))


def odd_numbers() -> st.SearchStrategy[dict[str, Any]]:
    """Values in range for fields whose size allocates nothing."""
    free = {name: rule for name, rule in FIELDS.items() if name not in SMALL and not _allocates(name)}
    # Some at a time: all of them are more than Hypothesis takes for an example, and are nearly always refused.
    names = st.sets(st.sampled_from(sorted(free)), max_size=24)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: in_range(free[name]) for name in sorted(some)}))


def _allocates(name: str) -> bool:
    return name.endswith(("_experts", "_size", "_head_dim", "per_layer_input")) or name in {
        "head_dim", "decoder_sparse_step", "num_layers"
    }  # fmt: skip


# The others have many settings, or models that take long to build, or no field that these do not have.
FAST = {"deepseek_v3", "gemma3_text", "gpt_oss", "laguna", "llama4_text", "mixtral"}


# A family's own name for the number of layers.
MORE = {"longcat_flash": {"num_layers": 1}}


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
@given(odd_numbers())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_passes_makes_a_model_or_is_refused(family: str, values: dict[str, Any]) -> None:
    import torch

    try:
        model = define(ModelConfig({"model_type": family, **SMALL, **MORE.get(family, {}), **values}), torch.float32)
    except UnsupportedModel:
        return
    assert all(buffer.isfinite().all() for buffer in model.buffers())


@given(st.dictionaries(st.sampled_from([*FIELDS, *LISTS, *ROPE_FIELDS, "auto_map", "x"]), JSON, max_size=5))
@settings(max_examples=400, deadline=None)
def test_random_values_are_refused_or_in_range(values: dict[str, Any]) -> None:
    try:
        config = ModelConfig({"model_type": "qwen3_moe", **SMALL, **values})
    except UnsupportedModel as error:
        refusal = str(error)
    else:
        refusal = ""
    assert refusal.isprintable()
    if refusal:
        return
    for name, rule in FIELDS.items():
        value = config.values.get(name)
        assert value is None or rule.admits(value)
        assert not isinstance(value, float) or math.isfinite(value)
    assert "x" not in config.values


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300, deadline=None)
def test_random_files_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_bytes(data)
    with pytest.raises(UnsupportedModel) as refused:
        ModelConfig.read(folder)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"hidden_size": 1, "hidden_size": 2}', "2 times"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"x": "\xff"}', "not UTF-8"),
        (b'{"x":' * 100_000, "nested"),
        (b'{"model_type": "llama", "x": ' + b"[" * 40 + b"]" * 40 + b"}", "deeper than 32"),
        (b"[]", "a list of 0"),
    ],
)
def test_what_is_no_configuration_is_named(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UnsupportedModel, match=says):
        ModelConfig.read(tmp_path)


def test_a_file_over_the_cap_or_none_at_all_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_NBYTES + 1))
    with pytest.raises(BadCheckpoint, match="at most"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match="is missing"):
        ModelConfig.read(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadCheckpoint, match="pipe"):
        ModelConfig.read(tmp_path)
