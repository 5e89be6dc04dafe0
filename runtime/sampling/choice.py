"""Filters and the draw: from a tile of logits to one token a row. Knows no sequence, seed or penalty.

Order of the filters, as in vLLM: temperature, min-p, top-k, top-p. Each keeps a prefix of the row's order, and
top-p takes its share of what the two before it left; transformers and llama.cpp apply min-p last, which keeps the
same tokens unless min-p and top-p are both on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .draw import NO_TOKEN
from .order import below_peak, first_keys, read_keys
from .weights import total, unit, weights

# Few tokens carry nearly all the mass of a language model's row, so most draws end within this many places; the
# others look again, at WIDER times as many. The answer is the same for any value.
FIRST_LOOK = 256
WIDER = 16

_UNKNOWN = torch.finfo(torch.float64).max


class Settings(NamedTuple):
    """One column [R, 1] float64 per setting; a filter that is off holds V, 1 or 0. Greedy is top_k 1."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def rows(self, index: Tensor) -> Settings:
        return Settings(*(column[index] for column in self))


def choose(logits: Tensor, settings: Settings) -> Tensor:
    """Token ids int64 [R] of fp32 logits [R, V]; `NO_TOKEN` where a logit is NaN or +inf, or all are -inf.

    Takes the first token in the row's order whose cumulative probability exceeds `uniform`.
    """
    vocab_size = logits.shape[-1]
    peak, distances = below_peak(logits)
    mass = _unfiltered_mass(distances, settings)
    places = min(FIRST_LOOK, vocab_size)
    token_ids, found = _look(first_keys(distances, places), mass, settings, vocab_size)
    beyond = (~found).nonzero().squeeze(-1)
    while len(beyond) and places < vocab_size:
        places = min(places * WIDER, vocab_size)
        keys = first_keys(distances[beyond], places)
        token_ids[beyond], found = _look(keys, mass[beyond], settings.rows(beyond), vocab_size)
        beyond = beyond[~found]
    return token_ids.masked_fill_(~peak.squeeze(-1).isfinite(), NO_TOKEN)


def _unfiltered_mass(distances: Tensor, settings: Settings) -> Tensor:
    """Weight of the whole row [R, 1] where top-k and min-p are off: the one thing that no prefix can tell."""
    vocab_size = distances.shape[-1]
    unfiltered = (settings.top_k >= vocab_size) & (settings.min_p == 0)
    unknown = torch.full_like(settings.uniform, _UNKNOWN)
    if not unfiltered.any():
        return unknown
    return torch.where(unfiltered, total(weights(distances, settings.temperature, vocab_size)), unknown)


def _look(keys: Tensor, mass: Tensor, settings: Settings, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Token ids [R] drawn from the first N places [R, N] of the order, and whether N places were enough [R]."""
    distances, ids = read_keys(keys)
    num_places = keys.shape[-1]
    each = weights(distances, settings.temperature, vocab_size).to(torch.float64)
    places = torch.arange(num_places, device=keys.device)
    allowed = (each >= settings.min_p * unit(vocab_size)) & (places < settings.top_k)
    cumulative = each.masked_fill_(~allowed, 0.0).cumsum(dim=-1)
    ends_here = ~allowed[:, -1:] | (num_places == vocab_size)
    mass = torch.where(ends_here, cumulative[:, -1:], mass)
    # The nucleus is the shortest prefix that holds top_p of the mass; rounding must not shorten it where top-p is off.
    nucleus_end = torch.searchsorted(cumulative, settings.top_p * mass)
    nucleus = cumulative.gather(-1, nucleus_end.clamp(max=num_places - 1))
    whole = settings.top_p == 1.0
    # uniform * mass < mass also after rounding, since mass <= 2**53: the last place can be drawn, none behind it.
    level = settings.uniform * torch.where(whole, mass, nucleus)
    place = torch.searchsorted(cumulative, level, right=True)
    found = (place < num_places) & (whole | (nucleus_end < num_places))
    return ids.gather(-1, place.clamp(max=num_places - 1)).squeeze(-1), found.squeeze(-1)
