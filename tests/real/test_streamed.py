"""Weights that are read in every pass give the tokens of weights in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moedge import LLM, SamplingParams
from moedge.runtime.settings.errors import DoesNotFit
from support.real.text import QUESTIONS

pytestmark = pytest.mark.real
SIZES: dict[str, Any] = {
    "gpu_mem": 0, "max_model_len": 128, "max_sequences": 4, "rows": 8, "prompt_tokens": 48, "output_tokens": 16,
    "deterministic": True,
}  # fmt: skip


def answers(model: Path, **options: Any) -> tuple[list[list[int]], bool]:
    """Tokens, and whether weights were streamed."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:8]]
    with LLM(model, **SIZES, **options) as llm:
        outputs = llm.chat(chats, SamplingParams(max_tokens=16), progress=False)
        return [output.outputs[0].token_ids for output in outputs], llm.plan.streams


def smallest(model: Path, **options: Any) -> str:
    """The budget that the refusal of a small one names."""
    with pytest.raises(DoesNotFit) as refused:
        LLM(model, ram="64MiB", **SIZES, **options)
    found = re.search(r"--ram (\S+MiB)", str(refused.value))
    assert found is not None, refused.value
    return found[1]


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_the_smallest_budget_gives_the_tokens_of_an_ample_one(quant: str, model: Path, tmp_path: Path) -> None:
    options = {"quant": quant, "dtype": "fp32", "kv": "fp32"}
    ample, in_memory = answers(model, ram="6GiB", **options)
    tight, streamed = answers(model, ram=smallest(model, **options), disk_dir=tmp_path, **options)
    assert (in_memory, streamed) == (False, True)
    assert tight == ample
