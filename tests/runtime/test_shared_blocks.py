"""Blocks that several layers share (`runtime/model/definition.py`), with adapters for every use: they are held once,
whatever else streams. `test_recurrent_models.py` compares Zamba2's tokens, however prompts are cut.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Workload, minimum
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.shape.shards import model_shards
from moedge.runtime.source.model_source import open_source
from support.family_run import NEW_TOKENS, prompts
from support.tiny_families import SETTINGS, stored_numel

# Of the tiny checkpoint: the layers with a block, by block.
USES = ((1, 4, 6), (2, 5))
PLAIN = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=64, max_sequences=4)
JOB = Workload(4, 60)


def answers(loaded: LoadedEngine) -> list[list[int]]:
    sequences = [Sequence(ids, SequenceSampling(NEW_TOKENS), frozenset({2})) for ids in prompts()[:3]]
    for sequence in sequences:
        loaded.engine.add(sequence)
    list(loaded.engine.run())
    return [sequence.output_ids for sequence in sequences]


def run(folder: Path) -> list[list[int]]:
    with open_source(str(folder)) as source:
        plan = make_plan(source.shape, PLAIN, MemoryBudget(4 << 30), JOB)
        with closing(load_engine(source, plan)) as loaded:
            return answers(loaded)


def shared_numel(shape: ModelShape) -> int:
    return sum(matrix.numel for matrix in shape.layers[0].dense if matrix.name.startswith("shared_blocks."))


def test_blocks_count_once_with_the_layers_that_use_them(
    checkpoint: Callable[[str], Path], stock: Callable[[Path], torch.nn.Module]
) -> None:
    folder = checkpoint("zamba2")
    shape, model = read_shape(folder), stock(folder)
    assert shape.parameters == stored_numel(model)
    uses = {matrix.name: matrix.uses for matrix in shape.layers[0].dense}
    assert (uses["shared_blocks.0.self_attn.q_proj"], uses["shared_blocks.1.feed_forward.down_proj"]) == (3, 2)
    assert uses["shared_blocks.1.self_attn.linear_q_adapter_list.3.0"] == uses["mamba.in_proj"] == 1
    assert not any("shared" in matrix.name for layer in shape.layers[1:] for matrix in layer.dense)
    # Every use has keys and values of its own.
    assert [group.layers for group in shape.kv_groups] == [tuple(sorted(USES[0] + USES[1]))]
    assert shape == shape_of_config(ModelConfig.read(folder), "float32", {
        name: tuple(each.shape) for name, each in model.state_dict().items() if name != "lm_head.weight"
    })  # fmt: skip


def test_they_are_held_at_the_smallest_budget_where_all_else_streams(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with open_source(str(checkpoint("zamba2"))) as source:
        smallest, _ = budget_range(source.shape, PLAIN, JOB)
        plan = make_plan(source.shape, PLAIN, MemoryBudget(smallest), JOB)
        shards = model_shards(source.shape, "none", "fp32")
        assert plan.placement.held_dense == minimum(shards).held_dense == 1
        assert plan.held_nbytes >= shards.layers[0].dense.nbytes > 4 * shared_numel(source.shape) > 0
        assert any("blocks that layers share are held once" in note for note in plan.notes)
        prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        with closing(load_engine(source, plan, tmp_path / "store")) as loaded:
            before, passes = loaded.streamed.nbytes_from_disk, loaded.engine.metrics.passes
            found = answers(loaded)
            read = loaded.streamed.nbytes_from_disk - before
            streamed = sum(layer.dense.nbytes for layer in shards.layers[1:])
            assert read == streamed * (loaded.engine.metrics.passes - passes) > 0
    assert found == run(checkpoint("zamba2"))


def renamed(folder: Path, tmp_path: Path, found: int, wanted: int, *, copied: bool = False) -> Path:
    """A copy of a checkpoint that has a block under another layer's name, or under both."""
    shutil.copytree(folder, tmp_path / "renamed")
    path = tmp_path / "renamed" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if f"layers.{found}.shared_transformer." in name]:
        own = tensors[name].clone() if copied else tensors.pop(name)
        tensors[name.replace(f"layers.{found}.", f"layers.{wanted}.")] = own
    save_file(tensors, path, {"format": "pt"})
    return tmp_path / "renamed"


def test_a_block_may_lie_under_the_name_of_any_layer_that_uses_it(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Older releases of transformers write the name that comes last in the alphabet."""
    folder = renamed(checkpoint("zamba2"), tmp_path, USES[1][0], USES[1][-1])
    assert read_shape(folder) == read_shape(checkpoint("zamba2"))
    assert run(folder) == run(checkpoint("zamba2"))


def test_a_block_under_two_names_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers shares them only if they are equal."""
    folder = renamed(checkpoint("zamba2"), tmp_path, USES[0][0], USES[0][1], copied=True)
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.shared_blocks\.0\..* is in the files twice"):
        read_shape(folder)


def test_a_block_that_is_missing_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = renamed(checkpoint("zamba2"), tmp_path, USES[1][0], 3)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match="shared"):
        run(folder)


def test_adapters_that_are_not_as_wide_as_keys_are_refused(checkpoint: Callable[[str], Path]) -> None:
    values = json.loads((checkpoint("zamba2") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="num_key_value_heads is 2, wanted 4, as wide as adapters"):
        ModelConfig(values | {"num_key_value_heads": 2})


def test_blocks_that_transformers_does_not_share_are_refused(checkpoint: Callable[[str], Path]) -> None:
    """It ties them where it ties embeddings, as in all published files."""
    values = json.loads((checkpoint("zamba2") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings is False, wanted true: without it transformers"):
        ModelConfig(values | {"tie_word_embeddings": False})


def test_a_file_without_kinds_of_layers_has_those_of_the_class() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert ModelConfig({"model_type": "zamba2"}).get("layer_types") == CONFIG_MAPPING["zamba2"]().layers_block_type
    assert SETTINGS["zamba2"]["num_mem_blocks"] == len(USES)
