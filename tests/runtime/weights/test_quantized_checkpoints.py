"""A quantized checkpoint of every layout loads, streams at the smallest budget and computes what its weights mean."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.offload.store.store import Store
from moedge.runtime.engine.batch import Batch
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import precision, prepare
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.settings.budgets import Budgets, MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source
from support.quantized_checkpoints import FORMATS, write_quantized

pytestmark = pytest.mark.numerics

PROMPTS = ([5, 80, 31, 200], [7, 7, 300])
JOB = Workload(len(PROMPTS), 8)
SETTINGS = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=16, max_sequences=2, deterministic=True)
# Float32 sums in another order.
TOLERANCE = 1e-5


def streamed_logits(folder: Path, store: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits after each prompt, of an engine that reads its weights from disk at the smallest budget."""
    rows: dict[int, torch.Tensor] = {}
    sequences = [Sequence(prompt, SamplingParams(1, ignore_eos=True)) for prompt in PROMPTS]
    forward = ModelRunner.forward

    def kept(self: ModelRunner, batch: Batch) -> torch.Tensor:
        logits = forward(self, batch)
        rows.update((sequences.index(each), row.clone()) for each, row in zip(batch.sampling, logits, strict=True))
        return logits

    with open_source(str(folder)) as source, monkeypatch.context() as patch:
        smallest, _ = budget_range(source.shape, settings, JOB)
        prepare(source, store, *precision(source, settings.quant, settings.dtype), Budgets())
        plan = make_plan(source.shape, settings, MemoryBudget(smallest), JOB)
        with closing(load_engine(source, plan, store)) as loaded:
            patch.setattr(ModelRunner, "forward", kept)
            for sequence in sequences:
                loaded.engine.add(sequence)
            list(loaded.engine.run())
            assert loaded.streamed.nbytes_from_disk
    return torch.stack([rows[index] for index in range(len(PROMPTS))])


def stock_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])


@pytest.mark.sample("ct int4 g64 asym", "mxfp4")
@pytest.mark.parametrize("form", [*FORMATS, "mxfp4"])
def test_logits_are_those_of_the_dequantized_weights(
    form: str, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, wide = tmp_path / "quantized", tmp_path / "wide"
    write_quantized(form, quantized, wide, "gpt_oss" if form == "mxfp4" else "qwen3_moe")
    wanted = stock_logits(stock(wide))
    found = streamed_logits(quantized, tmp_path / "store", SETTINGS, monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


KEPT = {
    "bnb int8": "int8-f32",
    "bnb nf4": "nf4-f32",
    "ct int4 g32 bf16": "int4-g32-bf16",
    "ct int4 g64 fp16 asym": "int4-g64-f16-zp",
    "ct int8 g128 bf16": "int8-g128-bf16",
    "ct int8 rows": "int8-f32",
    "gptq v1": "int4-g32-f16-zp",
    "gptq v2 g128": "int4-g128-f16-zp",
    "awq": "int4-g32-f16-zp",
    "ct mxfp4": "mxfp4-e8m0",
    "mxfp4": "mxfp4-e8m0",
}


@pytest.mark.sample("ct int4 g64 fp16 asym", "bnb nf4")
@pytest.mark.parametrize("form", KEPT)
def test_kept_codes_mean_what_they_meant(
    form: str, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, wide = tmp_path / "quantized", tmp_path / "wide"
    write_quantized(form, quantized, wide, "gpt_oss" if form == "mxfp4" else "qwen3_moe")
    wanted = stock_logits(stock(wide))
    found = streamed_logits(quantized, tmp_path / "store", replace(SETTINGS, quant="kept"), monkeypatch)
    with Store.open(tmp_path / "store") as store:
        assert store.manifest.recipe["quant"] == KEPT[form]
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
