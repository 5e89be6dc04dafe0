"""What must not show in a deterministic row's logits (`runtime/model/runner.py`, `quant/matmul/`) shows in none of
their bits: threads, neighbours, chunks.

Tokens tell little of that: they differ only where two logits are nearly equal.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moedge.quant.matmul.thread_pool import torch_threads
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source

pytestmark = pytest.mark.numerics

LENGTHS, NEW_TOKENS = (3, 40, 17, 70, 1, 33), 3
JOB = Workload(len(LENGTHS), max(LENGTHS) + NEW_TOKENS)
# Where sides are no multiples of what kernels take at a time, threads and leftovers show most.
UNEVEN = {"intermediate_size": 100, "moe_intermediate_size": 100, "vocab_size": 388}
# Tokens of a pass, sequences together, threads of torch and of the crew.
WAYS = ((1024, 64, 1), (16, 3, 3), (37, 2, 4))

Logits = dict[tuple[int, int], torch.Tensor]


def all_logits(source: ModelSource, settings: Settings, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> Logits:
    """By prompt and number of tokens that were generated before."""
    found: Logits = {}
    forward = ModelRunner.forward
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 380, (length,), generator=generator).tolist() for length in LENGTHS]
    sequences = [Sequence(prompt, SequenceSampling(NEW_TOKENS, ignore_eos=True)) for prompt in prompts]

    def kept(self: ModelRunner, batch: Batch) -> torch.Tensor:
        logits = forward(self, batch)
        for row, sequence in zip(logits, batch.sampling, strict=True):
            found[sequences.index(sequence), len(sequence.output_ids)] = row.clone()
        return logits

    with monkeypatch.context() as patch, torch_threads(num_threads):
        patch.setenv("OMP_NUM_THREADS", str(num_threads))
        with closing(load_engine(source, make_plan(source.shape, settings, MemoryBudget(4 << 30), JOB))) as loaded:
            patch.setattr(ModelRunner, "forward", kept)
            for sequence in sequences:
                loaded.engine.add(sequence)
            list(loaded.engine.run())
    assert len(found) == len(LENGTHS) * NEW_TOKENS
    return found


def in_many_ways(
    model: Path,
    formats: tuple[str, str, str],
    deterministic: bool,
    ways: tuple[tuple[int, int, int], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> list[Logits]:
    dtype, quant, kv = formats
    settings = Settings(dtype=dtype, quant=quant, kv=kv, deterministic=deterministic)
    with open_source(str(model)) as source:
        return [
            all_logits(source, replace(settings, tokens_per_pass=tokens, max_sequences=together), threads, monkeypatch)
            for tokens, together, threads in ways
        ]


@pytest.mark.parametrize(
    ("family", "sizes", "formats"),
    [
        # The gate of its shared expert is one number a token.
        pytest.param("qwen2_moe", {}, ("fp32", "none", "fp32"), marks=pytest.mark.slow),
        ("deepseek_v3", UNEVEN, ("bf16", "int4", "int4")),
        pytest.param("deepseek_v3", {}, ("fp32", "none", "fp32"), marks=pytest.mark.slow),
        pytest.param("longcat_flash", {}, ("bf16", "none", "bf16"), marks=pytest.mark.slow),
        ("qwen2_moe", UNEVEN, ("fp32", "none", "fp32")),
        pytest.param("qwen3_moe", {}, ("bf16", "nf4", "int8"), marks=pytest.mark.slow),
        pytest.param("gpt_oss", UNEVEN, ("fp32", "int8", "int4"), marks=pytest.mark.slow),
        pytest.param("llama4_text", UNEVEN, ("fp32", "none", "fp32"), marks=pytest.mark.slow),
        pytest.param("gemma3_text", UNEVEN, ("bf16", "none", "bf16"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ways", [WAYS[:2], pytest.param(WAYS, marks=pytest.mark.slow)], ids=["two ways", "three ways"])
def test_neither_threads_nor_neighbours_nor_chunks_show_in_a_bit(
    family: str,
    sizes: dict[str, int],
    formats: tuple[str, str, str],
    ways: tuple[tuple[int, int, int], ...],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, *others = in_many_ways(checkpoint(family, **sizes), formats, True, ways, monkeypatch)
    for found in others:
        different = [row for row in wanted if not torch.equal(found[row], wanted[row])]
        assert not different


def test_by_default_they_show_in_roundings(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is promised of fp32 without `--deterministic`; and that they do show is the control of the above."""
    model, formats = checkpoint("qwen2_moe", **UNEVEN), ("fp32", "none", "fp32")
    wanted, *others = in_many_ways(model, formats, False, WAYS[:2], monkeypatch)
    # Behind the first token rows go on with tokens that may differ where logits are nearly equal.
    first = [row for row in wanted if not row[1]]
    errors = [(found[row] - wanted[row]).norm() / wanted[row].norm() for found in others for row in first]
    assert 0 < max(errors) < 1e-4
