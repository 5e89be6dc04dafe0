"""moedge finds the demo model's text exactly as likely as transformers does."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.budgets import MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source
from support.heldout import DEMO, predict

WINDOW = 512


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids: list[int] = tokenizer.encode((DEMO / "heldout.txt").read_text()[:4000], add_special_tokens=False)
    return ids[:WINDOW]


@pytest.mark.parametrize("tokens_per_pass", [100, 1024])
def test_perplexity_is_that_of_transformers(tokens_per_pass: int, token_ids: list[int]) -> None:
    assert len(token_ids) == WINDOW
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    settings = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=tokens_per_pass, max_sequences=1)
    following = torch.tensor(token_ids[1:])[:, None]
    with torch.inference_mode(), open_source(str(DEMO / "model")) as source:
        wanted = model(torch.tensor([token_ids])).logits[0, :-1].double().log_softmax(-1).gather(1, following)
        engine = load_engine(
            source, make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(1, WINDOW))
        ).engine
        found = torch.cat(list(predict(engine, token_ids)))[:-1].gather(1, following)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert abs(float((wanted.mean() - found.mean()).exp()) - 1) < 1e-3
    assert engine.scheduler.cache.groups[0].allocator.num_live == 0
