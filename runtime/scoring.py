"""How likely a model finds a text: the measure by which formats are judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from .batch import pack
from .engine import Engine
from .errors import DoesNotFit
from .sampling.params import SamplingParams
from .sequence import Sequence


def predict(engine: Engine, token_ids: list[int]) -> Iterator[torch.Tensor]:
    """Natural log probabilities of every token that could follow each of `token_ids`: fp64 [n, V], pass by pass.

    Runs through the engine's model and cache in passes of its own size; the engine must be idle.
    """
    scheduler, sequence = engine.scheduler, Sequence(token_ids, SamplingParams(1))
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


def score(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Natural log probability of every token but the first, given those before it: fp64 [len(token_ids) - 1]."""
    scored, following = [], torch.tensor(token_ids[1:])
    for logprobs in predict(engine, token_ids):
        following = following.to(logprobs.device)
        now, following = following[: len(logprobs)], following[len(logprobs) :]
        scored.append(logprobs[: len(now)].gather(1, now.unsqueeze(1)).squeeze(1))
    return torch.cat(scored)


def perplexity(engine: Engine, token_ids: Items[int], window: int) -> float:
    """exp of the mean negative log probability, in windows of `window` tokens that do not see each other."""
    windows = [list(token_ids[begin : begin + window]) for begin in range(0, len(token_ids), window)]
    scored = torch.cat([score(engine, ids) for ids in windows if len(ids) > 1])
    return math.exp(-float(scored.mean()))
