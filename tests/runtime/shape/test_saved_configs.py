"""Configurations as transformers writes them are read (`runtime/shape/config.py`), and mean the same afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.runtime.model.text_class import text_class
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.config import FULL_IN_WINDOWS, TWO_ATTENTIONS, ModelConfig, kind, window
from moedge.runtime.shape.families import SUPPORTED
from support.installed_transformers import installed
from support.known_shapes import CONFIGS
from support.tiny_families import tiny_config

# Defaults of transformers' classes that its own models cannot be built from, or cannot compute with.
CANNOT_RUN = dict.fromkeys(("deepseek_ocr2_text", "deepseek_v2", "dots1"), "num_experts_per_tok")
# 28 heads of 2,048 elements have 73 each, which cannot be rotated in pairs.
CANNOT_RUN["qwen3_omni_moe_text"] = "head_dim is 73"


def config_class(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family]


def meaning(config: Any) -> dict[str, Any]:
    """The fields that decide what a model computes."""
    values = json.loads(config.to_json_string(use_diff=False))
    unread = {
        "transformers_version", "architectures", "dtype", "_name_or_path", "id2label", "label2id", "use_cache",
        "initializer_range", "output_router_logits", "router_aux_loss_coef",
    }  # fmt: skip
    if config.model_type in TWO_ATTENTIONS:
        # Releases before 5.18 write a number of attention modules that nothing reads.
        unread.add("num_hidden_layers")
    return {name: value for name, value in values.items() if name not in unread and not name.endswith("dropout")}


def check_read_back(config: Any, folder: Path) -> None:
    config.save_pretrained(folder)
    found = ModelConfig.read(folder)
    assert meaning(type(config)(**{k: v for k, v in found.values.items() if k != "model_type"})) == meaning(config)
    layers = range(config.num_hidden_layers)
    for layer, wanted in zip(layers, getattr(config, "layer_types", None) or (), strict=False):
        assert window(found, layer) is None or kind(found, layer) == wanted
        # A window that the family's module does not use is none.
        if wanted == "full_attention" and found.family.model_type not in FULL_IN_WINDOWS:
            assert window(found, layer) is None


@pytest.mark.parametrize("family", installed(SUPPORTED))
def test_the_defaults_of_a_family_are_read_as_transformers_saves_them(family: str, tmp_path: Path) -> None:
    config = config_class(family)()
    if family not in CANNOT_RUN:
        check_read_back(config, tmp_path)
        return
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=CANNOT_RUN[family]):
        ModelConfig.read(tmp_path)
    with torch.device("meta"), pytest.raises((RuntimeError, TypeError)):
        text_class(type(config))(config)(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("family", installed(SUPPORTED))
def test_a_tiny_configuration_is_read_as_transformers_saves_it(family: str, tmp_path: Path) -> None:
    check_read_back(tiny_config(family), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_is_read_as_transformers_saves_it(name: str, tmp_path: Path) -> None:
    values = CONFIGS[name]
    check_read_back(config_class(values["model_type"])(**values), tmp_path)


def test_a_window_of_zero_is_refused_where_layers_slide(tmp_path: Path) -> None:
    config_class("mixtral")().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 0}))
    with pytest.raises(UnsupportedModel, match="sliding_window is 0, wanted a number from 1 on"):
        ModelConfig.read(tmp_path)
