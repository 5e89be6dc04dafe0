"""Log-probabilities of chosen and most likely tokens. Knows the model's own logits only, as vLLM's "raw_logprobs".

What penalties, temperature and filters did to the row is not in them, as in OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .draw import TokenLogprob
from .order import below_peak, first_keys, pack_keys, read_keys
from .weights import total, unit, weights


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """One per row of fp32 logits [R, V]; `num_top` says how many alternatives each row reports."""
    vocab_size = logits.shape[-1]
    _, distances = below_peak(logits)
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)
    away = distances.gather(-1, chosen)
    ids = torch.arange(vocab_size, device=logits.device)
    ranks = (distances < away).sum(dim=-1) + ((distances == away) & (ids < chosen)).sum(dim=-1) + 1
    shown = torch.cat([pack_keys(away, chosen), first_keys(distances, min(max(num_top), vocab_size))], dim=-1)
    shown_distances, shown_ids = (part.tolist() for part in read_keys(shown))
    one = torch.ones_like(logits[:, :1])
    masses = total(weights(distances, one, vocab_size)).squeeze(-1) / unit(vocab_size)
    return [
        _token_logprob(ids, away, mass, rank, num)
        for ids, away, mass, rank, num in zip(
            shown_ids, shown_distances, masses.tolist(), ranks.tolist(), num_top, strict=True
        )
    ]


def _token_logprob(ids: list[int], distances: list[float], mass: float, rank: int, num_top: int) -> TokenLogprob:
    """The chosen token comes first in `ids` and `distances`, then the most likely ones."""
    log_mass = math.log(mass)
    logprobs = [-distance - log_mass for distance in distances]
    top = zip(ids[1 : num_top + 1], logprobs[1 : num_top + 1], strict=True)
    return TokenLogprob(ids[0], logprobs[0], rank, tuple(pair for pair in top if pair[1] > -math.inf))
