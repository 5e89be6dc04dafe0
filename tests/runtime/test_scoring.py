"""moedge finds the demo model's text exactly as likely as transformers does."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moedge.runtime.load import load_engine
from moedge.runtime.model_source import open_source
from moedge.runtime.plan.planner import JobShape, Settings, make_plan
from moedge.runtime.scoring import perplexity, score

DEMO = Path(__file__).parents[2] / "examples" / "tiny_moe"
WINDOW = 512


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids: list[int] = tokenizer.encode((DEMO / "heldout.txt").read_text()[:8000], add_special_tokens=False)
    return ids[: 2 * WINDOW]


@pytest.mark.parametrize("tokens_per_pass", [100, 1024])
def test_perplexity_is_that_of_transformers(tokens_per_pass: int, token_ids: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    windows = torch.tensor(token_ids).view(2, WINDOW)
    with torch.inference_mode():
        logprobs = model(windows).logits[:, :-1].double().log_softmax(-1)
    wanted = logprobs.gather(2, windows[:, 1:, None]).squeeze(2)
    settings = Settings("fp32", "none", "fp32", tokens_per_pass=tokens_per_pass, max_sequences=1)
    with open_source(str(DEMO / "model")) as source:
        engine = load_engine(source, make_plan(source.shape, settings, 4 << 30, JobShape(1, WINDOW))).engine
        ours = score(engine, token_ids[:WINDOW])
        assert torch.allclose(ours, wanted[0], atol=1e-4)
        ratio = perplexity(engine, token_ids, WINDOW) / math.exp(-float(wanted.mean()))
    assert abs(ratio - 1) < 1e-3
    assert engine.scheduler.cache.groups[0].allocator.num_live == 0
