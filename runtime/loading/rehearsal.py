"""Runs a job's largest pass once after loading.

Too small a budget, or arithmetic that overflows, then shows before the first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import islice

import torch

from ..engine.sequence import Sequence
from ..plan.placement import Plan, Workload
from ..sampling.params import SequenceSampling
from ..settings.errors import SettingError
from .engine_loader import LoadedEngine

# Random tokens that are generated at a time.
_DRAWN = 4096


def rehearse(loaded: LoadedEngine, plan: Plan, workload: Workload, tokens: Iterator[int]) -> None:
    """Runs one pass with as many prompt tokens and sampled rows as the plan allows; the engine is as new afterwards.

    Where Triton kernels compute attention, the longest prompt of one pass follows, and a pass that decodes over it and
    so splits its keys. `tokens` come from `prompt_tokens`. Raises SettingError if values overflow in fp16. Check the
    engine's ledger after it: the peaks of the process are those of the worst pass then.
    """
    engine = loaded.engine
    live = min(plan.max_sequences, plan.tokens_per_pass, workload.sequences)
    length = max(
        1, min(plan.tokens_per_pass // live, workload.longest - 1, plan.kv_tokens * plan.kv_sequences // live - 1)
    )
    cache = engine.scheduler.cache
    shared = cache.sharing
    # Else sequences with the same beginning would share blocks, and the pass would not be the largest.
    cache.sharing = False
    failed = _run(loaded, live, length, 1, tokens)
    longest = min(plan.tokens_per_pass, workload.longest - 2, plan.kv_tokens - 2)
    if plan.attention == "triton" and longest > 0:
        failed += _run(loaded, 1, longest, 2, tokens)
    if plan.attention == "triton":
        # Launches every kernel that attention may need in the job, for all layers that were rehearsed.
        # Imports Triton.
        from ..attention.triton_backend import TritonAttention

        attention = loaded.model.attention
        assert isinstance(attention, TritonAttention), "the plan names the backend"
        for launch in attention.warm_up_launches():
            launch.run()
    cache.sharing = shared
    loaded.start_counting()
    if failed and plan.dtype == "fp16":
        raise SettingError(
            f"{failed} rehearsed rows got logits that are not finite: this model's numbers overflow in fp16, whose "
            "largest is 65,504; nothing was run. Give --dtype bf16 or --dtype fp32, and another output: this one's job "
            "was begun in fp16."
        )


def prompt_tokens(text: Items[int], vocab: int) -> Iterator[int]:
    """Yields token ids without end: those of `text`, in which overflow would show, then random ones.

    Random tokens of the whole vocabulary reach the experts that the text does not.
    """
    yield from text
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randint(vocab, (_DRAWN,), generator=generator).tolist()


def _run(loaded: LoadedEngine, live: int, length: int, generated: int, tokens: Iterator[int]) -> int:
    """Runs `live` sequences to their end; returns the number that got logits that are not finite."""
    for _ in range(live):
        # Sampled, not greedy: sampling needs the larger scratch.
        params = SequenceSampling(generated, temperature=1.0, ignore_eos=True)
        loaded.engine.add(Sequence(list(islice(tokens, length)), params))
    return sum(sequence.finish_reason == "error" for sequence in loaded.engine.run())
