"""How likely a model finds text that it never saw: what bench/quality.py judges formats by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import DoesNotFit

DEMO = Path(__file__).parents[2] / "examples" / "tiny_moe"


def predict(engine: Engine, token_ids: list[int]) -> Iterator[torch.Tensor]:
    """Natural log probabilities of every token that could follow each of `token_ids`: fp64 [n, V], pass by pass.

    Runs through the engine's model and cache in passes of its own size; the engine must be idle.
    """
    scheduler, sequence = engine.scheduler, Sequence(token_ids, SequenceSampling(1))
    if scheduler.cache.states is not None:
        sequence.table.state = scheduler.cache.states.take()
    try:
        while sequence.num_pending:
            count = min(sequence.num_pending, scheduler.limits.tokens_per_pass)
            if not scheduler.cache.grow(sequence.table, sequence.table.num_tokens + count):
                raise DoesNotFit(f"{len(token_ids)} tokens are more than the KV cache holds; score shorter texts")
            batch = replace(pack([(sequence, count)]), logit_rows=torch.arange(count))
            yield engine.model.forward(batch).double().log_softmax(-1)
            scheduler.cache.store(sequence.table, count)
    finally:
        scheduler.cache.release(sequence.table)
