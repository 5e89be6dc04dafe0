"""Logits of an engine that streams a checkpoint at the smallest budget, and those of a stock model."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import precision, prepare
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

PROMPTS = ([5, 80, 31, 200], [7, 7, 300])
JOB = Workload(len(PROMPTS), 8)
SETTINGS = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=16, max_sequences=2, deterministic=True)


def streamed_logits(folder: Path, store: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits after each prompt, of an engine that reads its weights from disk at the smallest budget."""
    rows: dict[int, torch.Tensor] = {}
    sequences = [Sequence(prompt, SequenceSampling(1, ignore_eos=True)) for prompt in PROMPTS]
    forward = ModelRunner.forward

    def kept(self: ModelRunner, batch: Batch) -> torch.Tensor:
        logits = forward(self, batch)
        rows.update((sequences.index(each), row.clone()) for each, row in zip(batch.sampling, logits, strict=True))
        return logits

    with open_source(str(folder)) as source, monkeypatch.context() as patch:
        smallest, _ = budget_range(source.shape, settings, JOB)
        prepare(source, store, *precision(source, settings.quant, settings.dtype), Budgets().on_cpu())
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
