"""SmolLM2 cut into experts (`bench/make_real_mixture.py`): with all of them it is the dense model, and moedge computes
what transformers does.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bench import make_real_mixture as cutting
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.heldout import predict

# Making the mixture takes a minute; bench/test_make_real_mixture.py holds the same laws on a tiny model.
pytestmark = [pytest.mark.real, pytest.mark.slow]
Dense = tuple[LlamaForCausalLM, Any]


@pytest.fixture(scope="module")
def dense() -> Dense:
    return cutting.load(None)


@pytest.fixture(scope="module")
def cuts(dense: Dense) -> list[cutting.Cut]:
    """Of fewer tokens than the checkpoint of the tables: minutes less, and no claim about quality."""
    return cutting.cut(
        dense[0], cutting.windows(dense[1], [cutting.prose()[0]], 4 * cutting.WINDOW), cutting.NUM_EXPERTS
    )


@pytest.fixture(scope="module")
def judged(dense: Dense) -> torch.Tensor:
    return cutting.windows(dense[1], [cutting.prose()[1]], cutting.WINDOW)


@torch.no_grad()
def test_with_all_experts_it_is_the_dense_model(
    dense: Dense, cuts: list[cutting.Cut], judged: torch.Tensor, tmp_path: Path
) -> None:
    cutting.write(*dense, cuts, cutting.NUM_EXPERTS, torch.float32, tmp_path / "all")
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "all", dtype=torch.float32).eval()
    assert (mixture(judged).logits - dense[0](judged).logits).abs().max() < 1e-2


def test_moedge_computes_what_transformers_does(
    dense: Dense, cuts: list[cutting.Cut], judged: torch.Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    cutting.write(*dense, cuts, cutting.PER_TOKEN, torch.float32, out)
    wanted = cutting.perplexity(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval(), judged)
    ids = judged[0].tolist()
    settings = Settings(dtype="fp32", quant="none", kv="fp32", max_sequences=1)
    with open_source(str(out)) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(8 << 30), Workload(1, len(ids)))
        with closing(load_engine(source, plan)) as loaded:
            logprobs = torch.cat(list(predict(loaded.engine, ids)))
    found = -logprobs[:-1].gather(1, judged[0][1:].unsqueeze(1)).mean()
    assert float(found.exp()) == pytest.approx(wanted, rel=1e-2)
