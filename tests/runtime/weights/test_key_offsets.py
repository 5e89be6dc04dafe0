"""The offsets of quantized keys: measured once, the same wherever the weights come from, kept in the store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.offload.errors import BadStore
from moedge.quant.native import library
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.source.model_source import open_source
from moedge.runtime.weights.key_offsets import FILE, fixed_token_ids, kept


def quantized_plan(shape: ModelShape, dtype: str, quant: str, compute: str) -> Plan:
    settings = Settings(
        dtype=dtype, quant=quant, kv="int4", compute=compute, tokens_per_pass=64, max_sequences=1, deterministic=True
    )
    return make_plan(shape, settings, MemoryBudget(4 << 30), Workload(1, 64))


@pytest.mark.sample("qwen3_moe-bf16-int4-int8")
@pytest.mark.parametrize(
    ("family", "dtype", "quant", "compute"),
    [
        ("qwen3_moe", "fp32", "none", "float"),
        ("qwen3_moe", "bf16", "int4", "int8"),
        ("qwen3_moe", "fp32", "int8", "int8"),
        ("gpt_oss", "fp32", "none", "float"),
        ("gpt_oss", "bf16", "mxfp4", "int8"),
        ("kimi_linear", "bf16", "int8", "int8"),
    ],
)
def test_a_store_keeps_what_loading_would_measure(
    family: str,
    dtype: str,
    quant: str,
    compute: str,
    checkpoint: Callable[[str], Path],
    engine: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """To the bit: tokens must not depend on whether weights are streamed."""
    if (quant, compute) == ("int4", "int8") and not library.available():
        pytest.skip(f"no library of CPU kernels: {library.lack()}")
    with open_source(str(checkpoint(family))) as source:
        plan = quantized_plan(source.shape, dtype, quant, compute)
        measured = engine(source, plan).key_offsets
        prepare(source, tmp_path / "store", quant, dtype, Budgets().on_cpu())
        stored = kept(tmp_path / "store", source.shape)
        loaded = engine(source, plan, tmp_path / "store")
        assert loaded.key_offsets is not None
        frames = [pool.key_transform for pool in loaded.engine.scheduler.cache.pools]
        digest = loaded.key_offsets.digest
    assert measured is not None
    assert stored is not None
    assert measured.layers.keys() == stored.layers.keys()
    assert all(torch.equal(measured.layers[layer], stored.layers[layer]) for layer in measured.layers)
    assert measured.digest == stored.digest == digest
    assert all(frame is not None and frame.offsets.abs().max() > 0 for frame in frames)


def test_native_keys_have_none(engine: Callable[..., Any]) -> None:
    loaded = engine("qwen3_moe", Workload(1, 64), tokens_per_pass=64, max_sequences=1)
    assert loaded.key_offsets is None
    assert all(pool.key_transform is None for pool in loaded.engine.scheduler.cache.pools)


def test_the_fixed_text_is_long_enough_in_any_vocabulary(checkpoint: Callable[[str], Path]) -> None:
    assert len(fixed_token_ids(checkpoint("qwen3_moe"))) == 256


@pytest.mark.slow
def test_damaged_and_foreign_files_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source, open_source(str(checkpoint("olmoe"))) as other:
        prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        data = (tmp_path / "store" / FILE).read_bytes()
        (tmp_path / "store" / FILE).write_bytes(data[:-5])
        with pytest.raises(BadStore, match="delete it"):
            kept(tmp_path / "store", source.shape)
        prepare(other, tmp_path / "other", "none", "fp32", Budgets().on_cpu())
        (tmp_path / "store" / FILE).unlink()
        assert kept(tmp_path / "store", source.shape) is None
        (tmp_path / "store" / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
        with pytest.raises(BadStore, match="another model"):
            kept(tmp_path / "store", source.shape)
