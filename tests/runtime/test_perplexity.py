"""moedge (`runtime/model/`) finds the demo model's text exactly as likely as transformers does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moedge.runtime.plan.placement import Workload
from support.heldout import DEMO, predict

WINDOW = 512


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    ids: list[int] = tokenizer.encode((DEMO / "heldout.txt").read_text()[:4000], add_special_tokens=False)
    return ids[:WINDOW]


@pytest.mark.parametrize("tokens_per_pass", [100, 1024])
def test_perplexity_is_that_of_transformers(
    tokens_per_pass: int, token_ids: list[int], engine: Callable[..., Any]
) -> None:
    assert len(token_ids) == WINDOW
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()
    following = torch.tensor(token_ids[1:])[:, None]
    loaded = engine(DEMO / "model", Workload(1, WINDOW), tokens_per_pass=tokens_per_pass, max_sequences=1).engine
    with torch.inference_mode():
        wanted = model(torch.tensor([token_ids])).logits[0, :-1].double().log_softmax(-1).gather(1, following)
        found = torch.cat(list(predict(loaded, token_ids)))[:-1].gather(1, following)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert abs(float((wanted.mean() - found.mean()).exp()) - 1) < 1e-3
    assert loaded.scheduler.cache.groups[0].allocator.num_live == 0
