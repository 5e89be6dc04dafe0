"""Text models that transformers has only inside models that also see (`runtime/model/text_class.py`), files that hold
several matrices as one (`runtime/shape/read.py`), and attention that is called twice. `make matrix` runs all families.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moedge.offload.checkpoint.header import TensorEntry
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model import definition, text_class
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.families import CONVERTED_AS, JOINED, TEXT_AND_PICTURES
from moedge.runtime.shape.read import divided
from support.family_run import run_family
from support.installed_transformers import installed, needs_transformers
from support.tiny_families import tiny_config


def entry(name: str, *shape: int, nbytes: int) -> TensorEntry:
    return TensorEntry(name, "BF16", shape, 100, 100 + nbytes)


def read_config(family: str) -> ModelConfig:
    return ModelConfig(json.loads(tiny_config(family).to_json_string(use_diff=False)))


def test_a_class_of_transformers_is_taken_where_there_is_one() -> None:
    assert text_class.text_class(CONFIG_MAPPING["qwen3_moe"]).__name__ == "Qwen3MoeForCausalLM"
    # It is in the table of models that see, and sees nothing.
    assert text_class.text_class(CONFIG_MAPPING["mistral4"]).__name__ == "Mistral4ForCausalLM"
    found = text_class.text_class(CONFIG_MAPPING["qwen3_vl_moe_text"])
    assert [each.__name__ for each in found.__mro__[:2]] == ["Qwen3VLMoeTextModelWithHead", "Qwen3VLMoePreTrainedModel"]


def test_a_text_model_that_a_release_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(text_class._NAMED_OTHERWISE, "qwen2_vl_text", "NoSuchModel")
    text_class._headed.cache_clear()
    with pytest.raises(UnsupportedModel, match="has no text model of 'qwen2_vl_text': a newer one is wanted"):
        text_class.text_class(CONFIG_MAPPING["qwen2_vl_text"])


@pytest.mark.parametrize("family", installed(sorted(CONVERTED_AS)))
def test_conversions_of_whole_models_are_there(family: str) -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    assert get_checkpoint_conversion_mapping(CONVERTED_AS[family])


def test_logits_are_scaled_as_the_whole_model_does() -> None:
    """Greedy tokens do not show it: muse_glimmer multiplies and bounds them, granite divides."""
    config = tiny_config("muse_glimmer_text")
    logits = torch.tensor([[3.0, -50.0]])
    wanted = 20 * torch.tanh(logits * config.output_multiplier / 20)
    assert text_class._scaled(config, logits).allclose(wanted)
    config = tiny_config("granite4_vision_text")
    assert text_class._scaled(config, logits).allclose(logits / 3)
    assert text_class._scaled(tiny_config("qwen3_vl_text"), logits).equal(logits)


@pytest.mark.slow
def test_without_a_number_for_each_call_diffllama_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the second call's values take the place of the first's."""
    monkeypatch.setattr(definition, "count_calls", lambda model, config: None)
    assert "differ" in run_family("diffllama", tmp_path).failure


@needs_transformers("5.24")
@pytest.mark.parametrize("family", sorted(JOINED))
def test_a_joined_matrix_is_as_many_as_its_rows(family: str) -> None:
    config = read_config(family)
    joined, names = JOINED[family]
    name = f"model.layers.1.attention.{joined}weight"
    rows = {"lara_mini": (160, 96, 4, 4), "sarvam_moe": (128, 64, 64)}[family]
    parts = divided(config, entry(name, sum(rows), 64, nbytes=sum(rows) * 128))
    assert [part.name for part in parts] == [name.replace(joined, own) for own in names]
    assert [part.shape for part in parts] == [(count, 64) for count in rows]
    assert [parts[0].begin, *(part.end for part in parts)] == [100 + 128 * sum(rows[:n]) for n in range(len(rows) + 1)]
    other = entry("model.layers.1.mlp.gate.weight", 8, 64, nbytes=1024)
    assert list(divided(config, other)) == [other]
    with pytest.raises(BadCheckpoint, match=rf"{joined}weight' is \[7, 64\], wanted {sum(rows)} rows"):
        divided(config, entry(name, 7, 64, nbytes=7 * 128))
    with pytest.raises(BadCheckpoint, match=r"is \[\], wanted"):
        divided(config, entry(name, nbytes=2))


def test_what_is_for_pictures_is_left_in_the_file() -> None:
    config = read_config(TEXT_AND_PICTURES)
    layer = "model.layers.1.mlp."
    for name in ("gate.weight_1", "experts.8.up_proj.weight", "experts.15.down_proj.weight"):
        assert divided(config, entry(layer + name, 64, 8, nbytes=1024)) == []
    for name in ("gate.weight", "experts.7.up_proj.weight"):
        whole = entry(layer + name, 64, 8, nbytes=1024)
        assert divided(config, whole) == [whole]
    (first,) = divided(config, entry(f"{layer}moe_statics.e_score_correction_bias", 2, 8, nbytes=64))
    assert (first.shape, first.begin, first.end) == ((1, 8), 100, 132)
