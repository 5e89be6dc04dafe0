"""Filters and the draw: from a tile of logits to one token per row. Knows no sequence, seed or penalty.

The filters apply in vLLM's order: temperature, min-p, top-k, top-p. Each keeps a prefix of the row's tokens, sorted by
rank, and top-p counts the mass that the filters before it left; transformers and llama.cpp apply min-p last, which
keeps the same tokens unless min-p and top-p are both on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .draw import NO_TOKEN
from .params import TokenLogprob

_ID_BITS = 32


def below_peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit [R, 1], and its distance from each logit [R, V]: +0.0 to inf, NaN in broken rows."""
    # Adding zero turns a peak of -0.0 into +0.0; a distance of -0.0 would have bits that do not sort.
    peak = logits.amax(dim=-1, keepdim=True) + 0.0
    return peak, peak - logits


def rank_keys(distances: Tensor) -> Tensor:
    """int64 sort keys [R, V], all different in a row: the token of rank 0 has the smallest.

    The upper half holds the bits of `distances` fp32 [R, V] from `below_peak`, which sort like their values when read
    as integers; the lower half holds the token id.
    """
    return pack_keys(distances, torch.arange(distances.shape[-1], device=distances.device))


def pack_keys(distances: Tensor, ids: Tensor) -> Tensor:
    """The sort keys of tokens `ids`, broadcast against their `distances` fp32."""
    return distances.view(torch.int32).to(torch.int64).bitwise_left_shift_(_ID_BITS).add_(ids)


def first_keys(distances: Tensor, count: int) -> Tensor:
    """The `count` smallest keys of each row of distances [R, V], in order: [R, count]."""
    if count == 0:
        return distances.new_empty(len(distances), 0, dtype=torch.int64)
    if distances.device.type == "cpu":
        # numpy's sorting and partitioning are vectorised: 152k keys take 1.2 ms where torch's sort takes 10.
        if count < distances.shape[-1]:
            return torch.from_numpy(_smallest(distances.view(torch.int32).numpy(), count))
        return torch.from_numpy(np.sort(rank_keys(distances).numpy(), axis=-1))
    keys = rank_keys(distances)
    return keys.topk(count, dim=-1, largest=False).values if count < keys.shape[-1] else keys.sort(dim=-1).values


def read_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks sort keys: distances fp32 and token ids int64, both shaped like `keys`."""
    ids = keys & (2**_ID_BITS - 1)
    return (keys >> _ID_BITS).to(torch.int32).view(torch.float32), ids


def _smallest(bits: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """`first_keys` of distances as integers; it makes keys only of the tokens that are among the first."""
    last = np.partition(bits, count - 1, axis=-1)[:, count - 1 : count]
    kept = bits <= last
    if np.count_nonzero(kept) > kept.shape[0] * count:
        _drop_late_ties(kept, bits, last, count)
    row_begins = np.arange(len(bits))[:, np.newaxis] * bits.shape[1]
    ids = np.flatnonzero(kept).reshape(-1, count) - row_begins
    keys: NDArray[np.int64] = np.take_along_axis(bits, ids, axis=-1).astype(np.int64) << _ID_BITS | ids
    keys.sort(axis=-1)
    return keys


def _drop_late_ties(kept: NDArray[np.bool_], bits: NDArray[np.int32], last: NDArray[np.int32], count: int) -> None:
    """Keeps, of the tokens that tie with a row's last one, those with the lowest ids, so that `count` remain per row.

    Where few tokens are allowed, all others tie at infinity, and the first of them are near the row's beginning.
    """
    for row in np.flatnonzero(np.count_nonzero(kept, axis=-1) > count):
        np.less(bits[row], last[row], out=kept[row])
        missing, width = count - np.count_nonzero(kept[row]), count
        while len(tied := np.flatnonzero(bits[row, :width] == last[row])) < missing:
            width *= 4
        kept[row, tied[:missing]] = True


def unit(vocab_size: int) -> float:
    """The weight of a row's most likely token: the largest power of two such that `vocab_size` of them sum to 2**53
    at most.
    """
    return 2.0 ** (53 - (vocab_size - 1).bit_length())


def weights(distances: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """exp(-distance / temperature) * `unit`, rounded: fp32, shaped like `distances` [R, N]; temperature [R, 1].

    With 262,144 tokens the unit is 2**35: a token that is 2**36 times less likely than the best one is never drawn.
    """
    # The bounds keep 0 / temperature and inf / temperature from being NaN.
    bounded = temperature.clamp(1e-37, 1e37).to(torch.float32)
    return (distances / -bounded).exp_().mul_(unit(vocab_size)).round_()


def total(weights_: Tensor) -> Tensor:
    """The exact sum of each row, float64 [R, 1]."""
    if weights_.device.type == "cpu":
        # torch would first make a copy of everything in float64.
        return torch.from_numpy(np.add.reduce(weights_.numpy(), axis=-1, dtype=np.float64, keepdims=True))
    return weights_.sum(dim=-1, keepdim=True, dtype=torch.float64)


# Few tokens carry nearly all the mass of a language model's row, so that most draws end within this many ranks; the
# others search again among WIDER times as many. The result is the same for any value.
FIRST_RANKS = 256
WIDER = 16

_UNKNOWN = torch.finfo(torch.float64).max


class Settings(NamedTuple):
    """One column [R, 1] float64 per setting. Filters are off at top_k V, top_p 1 and min_p 0; greedy is top_k 1."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def rows(self, index: Tensor) -> Settings:
        return Settings(*(column[index] for column in self))


def choose(logits: Tensor, settings: Settings) -> Tensor:
    """Token ids int64 [R] of fp32 logits [R, V]; `NO_TOKEN` where a logit is NaN or +inf, or all are -inf.

    The token is the first one by rank whose cumulative probability exceeds `uniform`.
    """
    vocab_size = logits.shape[-1]
    peak, distances = below_peak(logits)
    mass = _unfiltered_mass(distances, settings)
    num_ranks = min(FIRST_RANKS, vocab_size)
    token_ids, found = _draw(first_keys(distances, num_ranks), mass, settings, vocab_size)
    beyond = (~found).nonzero().squeeze(-1)
    while len(beyond) and num_ranks < vocab_size:
        num_ranks = min(num_ranks * WIDER, vocab_size)
        keys = first_keys(distances[beyond], num_ranks)
        token_ids[beyond], found = _draw(keys, mass[beyond], settings.rows(beyond), vocab_size)
        beyond = beyond[~found]
    return token_ids.masked_fill_(~peak.squeeze(-1).isfinite(), NO_TOKEN)


def _unfiltered_mass(distances: Tensor, settings: Settings) -> Tensor:
    """The weight of the whole row [R, 1] where top-k and min-p are off: no prefix of the ranks contains it."""
    vocab_size = distances.shape[-1]
    unfiltered = (settings.top_k >= vocab_size) & (settings.min_p == 0)
    unknown = torch.full_like(settings.uniform, _UNKNOWN)
    if not unfiltered.any():
        return unknown
    return torch.where(unfiltered, total(weights(distances, settings.temperature, vocab_size)), unknown)


def _draw(keys: Tensor, mass: Tensor, settings: Settings, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Token ids [R] drawn from the first N ranks [R, N], and whether N ranks were enough [R]."""
    distances, ids = read_keys(keys)
    num_ranks = keys.shape[-1]
    each = weights(distances, settings.temperature, vocab_size).to(torch.float64)
    ranks = torch.arange(num_ranks, device=keys.device)
    allowed = (each >= settings.min_p * unit(vocab_size)) & (ranks < settings.top_k)
    cumulative = each.masked_fill_(~allowed, 0.0).cumsum(dim=-1)
    ends_here = ~allowed[:, -1:] | (num_ranks == vocab_size)
    mass = torch.where(ends_here, cumulative[:, -1:], mass)
    # The nucleus is the shortest prefix that holds top_p of the mass; rounding must not shorten it where top-p is off.
    nucleus_end = torch.searchsorted(cumulative, settings.top_p * mass)
    nucleus = cumulative.gather(-1, nucleus_end.clamp(max=num_ranks - 1))
    whole = settings.top_p == 1.0
    # uniform * mass < mass also after rounding, since mass <= 2**53: the last rank can be drawn, none behind it.
    level = settings.uniform * torch.where(whole, mass, nucleus)
    rank = torch.searchsorted(cumulative, level, right=True)
    found = (rank < num_ranks) & (whole | (nucleus_end < num_ranks))
    return ids.gather(-1, rank.clamp(max=num_ranks - 1)).squeeze(-1), found.squeeze(-1)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of each row's token under fp32 logits [R, V]; row i reports `num_top[i]` alternatives."""
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
