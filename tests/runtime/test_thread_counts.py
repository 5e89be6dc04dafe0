"""How many threads and cores there are shows in no logit of a deterministic pass."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from moedge.quant.matmul.thread_pool import torch_threads
from moedge.runtime.engine.batch import Batch
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.planner import Settings, Workload, make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.source.model_source import ModelSource, open_source

pytestmark = pytest.mark.numerics

LENGTHS, NEW_TOKENS = (3, 40, 17), 3
# Products whose sides are no multiples of what kernels take at a time are those that threads show in.
UNEVEN = {"intermediate_size": 100, "moe_intermediate_size": 100, "vocab_size": 388}
JOB = Workload(len(LENGTHS), max(LENGTHS) + NEW_TOKENS)


def all_logits(
    source: ModelSource, settings: Settings, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Those of every pass, with as many threads of torch and in the crew."""
    found: list[torch.Tensor] = []
    forward = ModelRunner.forward

    def kept(self: ModelRunner, batch: Batch) -> torch.Tensor:
        logits = forward(self, batch)
        found.append(logits.clone())
        return logits

    with monkeypatch.context() as patch, torch_threads(num_threads):
        patch.setenv("OMP_NUM_THREADS", str(num_threads))
        patch.setattr(ModelRunner, "forward", kept)
        with closing(load_engine(source, make_plan(source.shape, settings, 4 << 30, JOB))) as loaded:
            generator = torch.Generator().manual_seed(1)
            for length in LENGTHS:
                prompt = torch.randint(5, 380, (length,), generator=generator).tolist()
                loaded.engine.add(Sequence(prompt, SamplingParams(NEW_TOKENS, ignore_eos=True)))
            list(loaded.engine.run())
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "quant", "kv"),
    [
        ("qwen3_moe", "fp32", "none", "fp32"),
        ("qwen3_moe", "bf16", "nf4", "int8"),
        ("gpt_oss", "fp32", "int8", "int4"),
        ("gemma3_text", "fp32", "none", "fp32"),
    ],
)
def test_the_number_of_threads_shows_in_no_logit(
    family: str,
    dtype: str,
    quant: str,
    kv: str,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(dtype, quant, kv, tokens_per_pass=24, max_sequences=3, deterministic=True)
    with open_source(str(checkpoint(family, **UNEVEN))) as source:
        wanted, *others = (all_logits(source, settings, count, monkeypatch) for count in (1, 3, 4))
    assert len(wanted) > NEW_TOKENS, "several passes"
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
