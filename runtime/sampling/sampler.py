"""From a pass's logits to its tokens, in tiles of bounded memory. Knows no model and no text.

Logits are changed first: biases, penalties for tokens that were used, and masks of a grammar. Filters then apply in
vLLM's order: temperature, min-p, top-k, top-p. Each keeps a prefix of the row's tokens, sorted by rank, and top-p
counts the mass that the filters before it left; transformers and llama.cpp apply min-p last, which keeps the same
tokens unless min-p and top-p are both on.

Log-probabilities are the model's own: penalties, filters and masks decide which token is drawn, not its probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...quant.matmul.matmul import ParallelMatmul
from ...quant.native.calls import argmax
from .draw import NO_TOKEN, Draw, Sampled, uniform
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


# Columns whose weights a CPU has at once: they stay in its cache.
_COLUMNS = 1 << 14


def mass_of(distances: Tensor, temperature: Tensor) -> Tensor:
    """The exact sum of the weights of all tokens, float64 [R, 1], by distances [R, V]."""
    vocab_size = distances.shape[-1]
    parts = torch.split(distances, _COLUMNS if distances.is_cpu else vocab_size, dim=-1)
    # Integers up to 2**53: no order of the sum rounds.
    return torch.stack([total(weights(part, temperature, vocab_size)) for part in parts]).sum(dim=0)


# Few tokens carry nearly all the mass of a language model's row, so that most draws end within this many ranks; the
# others search again among WIDER times as many. The result is the same for any value.
FIRST_RANKS = 256
WIDER = 16

_UNKNOWN = torch.finfo(torch.float64).max


class SamplerColumns(NamedTuple):
    """One column [R, 1] float64 per setting. Filters are off at top_k V, top_p 1 and min_p 0; greedy is top_k 1."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def rows(self, index: Tensor) -> Self:
        return type(self)(*(column[index] for column in self))


def choose(logits: Tensor, settings: SamplerColumns) -> Tensor:
    """Token ids int64 [R] of fp32 logits [R, V]; `NO_TOKEN` where a logit is NaN or +inf, or all are -inf.

    The token is the first one by rank whose cumulative probability exceeds `uniform`.
    """
    vocab_size = logits.shape[-1]
    peak, distances = below_peak(logits)
    unfiltered, mass = _unfiltered(settings, vocab_size), torch.full_like(settings.uniform, _UNKNOWN)
    if unfiltered.any():
        mass = torch.where(unfiltered, mass_of(distances, settings.temperature), mass)
    num_ranks = min(FIRST_RANKS, vocab_size)
    token_ids, found = _draw(first_keys(distances, num_ranks), mass, settings, vocab_size)
    beyond = (~found).nonzero().squeeze(-1)
    while len(beyond) and num_ranks < vocab_size:
        num_ranks = min(num_ranks * WIDER, vocab_size)
        keys = first_keys(distances[beyond], num_ranks)
        token_ids[beyond], found = _draw(keys, mass[beyond], settings.rows(beyond), vocab_size)
        beyond = beyond[~found]
    return token_ids.masked_fill_(~peak.squeeze(-1).isfinite(), NO_TOKEN)


def _unfiltered(settings: SamplerColumns, vocab_size: int) -> Tensor:
    """Where top-k and min-p are off [R, 1]: no prefix of the ranks contains the mass of such a row."""
    return (settings.top_k >= vocab_size) & (settings.min_p == 0)


def _draw(keys: Tensor, mass: Tensor, settings: SamplerColumns, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Token ids [R] drawn from the first N ranks [R, N], and whether these were enough [R]."""
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
    masses = mass_of(distances, one).squeeze(-1) / unit(vocab_size)
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


def bias(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Adds, in place, to the logits [R, V] what each of the R draws asks for, and sets those it forbids to -inf."""
    vocab_size = logits.shape[-1]
    for row, draw in enumerate(draws):
        added = [(token_id, value) for token_id, value in draw.params.logit_bias if token_id < vocab_size]
        added += [(token_id, -torch.inf) for token_id in draw.forbidden if token_id < vocab_size]
        if added:
            ids, values = zip(*added, strict=True)
            logits[row, torch.tensor(ids, device=logits.device)] += torch.tensor(values, device=logits.device)


def penalise(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Lowers, in place, the logits [R, V] of the tokens in each draw's history; rows without penalties stay."""
    touched = [_touched(row, draw, logits.shape[-1]) for row, draw in enumerate(draws) if draw.params.penalised]
    if not touched:
        return
    positions, factors = (np.concatenate(part, axis=1) for part in zip(*touched, strict=True))
    rows, ids = torch.from_numpy(positions).to(logits.device)
    repetition, offset = torch.from_numpy(factors).to(logits.device)
    values = logits[rows, ids]
    logits[rows, ids] = torch.where(values > 0, values / repetition, values * repetition) - offset


def _touched(row: int, draw: Draw, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(row, id) [2, N] of the logits to change, and (repetition factor, offset to subtract) [2, N] for each."""
    assert draw.history is not None
    params, ids, counts = draw.params, draw.history.ids, draw.history.counts
    # Ids of special tokens in the prompt can exceed the rows of the output head.
    keep = ids < vocab_size
    if params.repetition_penalty == 1.0:
        keep &= counts > 0
    ids, counts = ids[keep], counts[keep]
    offset = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return (
        np.stack([np.full_like(ids, row), ids]),
        np.stack([np.full_like(offset, params.repetition_penalty), offset]).astype(np.float32),
    )


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks `bits` uint8 [M, N] of M `rows` of a pass: bit t % 8 of byte t // 8 is 1 if token t is allowed.

    8 * N is at least the size of the vocabulary.
    """

    rows: list[int]
    bits: Tensor


def forbid(logits: Tensor, bits: Tensor) -> None:
    """Sets to -inf, in place, every logit [R, V] whose bit [R, N] is 0."""
    # A table of the eight flags of every byte, each read as one integer: bit shifts would take eight times the reads.
    table = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)).bitwise_and_(1).eq_(0).to(torch.bool)
    eights = table.view(torch.int64).squeeze(-1).to(logits.device)
    forbidden = eights[bits.to(logits.device).long()].view(torch.bool)
    logits.masked_fill_(forbidden[:, : logits.shape[-1]], -torch.inf)


# The most bytes of temporaries per logit of a tile, where all rows need a full sort: 55 were counted on a CPU, and the
# sort of a device allocates more.
CPU_BYTES_PER_LOGIT = 56
BYTES_PER_LOGIT = 96
# The same where a kernel draws, which needs a copy of a row whose logits are changed, and their masks.
COPIED_BYTES_PER_LOGIT = 16


# Token ids [R] on the device of logits [B, V] of some of its rows, by their `SamplerColumns` [5, R, 1] in host memory.
DrawRows: TypeAlias = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws one token per row, which depends on the row's own logits and `Draw` alone, to the last bit.

    Temporaries stay below `scratch_nbytes`, or take what a single row needs if that is more. `draw`, if not None, is
    the kernel of a device (kernel.py). The threads of `compute` have tiles of their own: operations on a few rows are
    too small for several threads.
    """

    # On a CPU a plane of fp32 then stays below 1 MiB and in the cache: larger ones are mapped anew each time.
    scratch_nbytes: int = 24 << 20
    draw: DrawRows | None = None
    compute: ParallelMatmul | None = None

    def sample(self, logits: Tensor, draws: Sequence[Draw], masks: TokenMasks | None = None) -> Sampled:
        """Draws one token for each row of `logits` [B, V], of any dtype and on any device; does not change them.

        A row gets `NO_TOKEN` and no logprobs if its logits contain NaN or +inf, or only -inf where its mask allows
        tokens.
        """
        masked = frozenset(masks.rows) if masks is not None else frozenset()
        drawn = [row for row, draw in enumerate(draws) if row not in masked and not draw.is_argmax]
        whole = len(drawn) + len(masked) == len(draws)
        token_ids = np.full(len(draws), NO_TOKEN) if whole else _argmax(logits)
        if drawn:
            token_ids[drawn] = self._draw_rows(logits, drawn, [draws[row] for row in drawn], None)
        if masks is not None and masks.rows:
            token_ids[masks.rows] = self._draw_rows(logits, masks.rows, [draws[row] for row in masks.rows], masks.bits)
        for row, draw in enumerate(draws):
            if draw.forced is not None and token_ids[row] != NO_TOKEN:
                token_ids[row] = draw.forced
        return Sampled(token_ids, self._logprobs(logits, draws, token_ids.tolist()))

    def score(
        self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> tuple[TokenLogprob | None, ...]:
        """The log-probability of a given token by each row of `logits` [B, V], with `num_top` alternatives.

        None for a row whose logits contain NaN or +inf. A token that the output head does not have is impossible.
        """
        scores: list[TokenLogprob | None] = [None] * len(token_ids)
        last = logits.shape[-1] - 1

        def score_tile(part: slice) -> None:
            broken = _argmax(logits[part]) == NO_TOKEN
            ids = [min(token_id, last) for token_id in token_ids[part]]
            found = token_logprobs(logits[part].float(), ids, num_top[part])
            scores[part] = [None if bad else each for bad, each in zip(broken, found, strict=True)]

        self._for_tiles(len(token_ids), logits, score_tile)
        return tuple(
            replace(score, token_id=token_id, logprob=-math.inf, rank=last + 2) if score and token_id > last else score
            for score, token_id in zip(scores, token_ids, strict=True)
        )

    def _draw_rows(
        self, logits: Tensor, rows: list[int], draws: Sequence[Draw], bits: Tensor | None
    ) -> NDArray[np.int64]:
        """The tokens of `rows`; each row has a draw, and a mask unless `bits` is None."""
        settings = None if all(draw.is_argmax for draw in draws) else _settings(draws, logits.shape[-1])
        if self.draw is None or settings is None or bits is not None:
            return self._draw_tiles(logits, rows, draws, settings, bits)
        changed = np.array([draw.biased for draw in draws])
        as_they_are, others = np.flatnonzero(~changed), np.flatnonzero(changed)
        found = np.empty(len(rows), dtype=np.int64)
        if len(as_they_are):
            where = [rows[at] for at in as_they_are]
            found[as_they_are] = self.draw(logits, settings[:, as_they_are], where).cpu().numpy()
        if len(others):
            where, theirs = [rows[at] for at in others], [draws[int(at)] for at in others]
            found[others] = self._draw_tiles(logits, where, theirs, settings[:, others], None)
        return found

    def _draw_tiles(
        self, logits: Tensor, rows: list[int], draws: Sequence[Draw], settings: Tensor | None, bits: Tensor | None
    ) -> NDArray[np.int64]:
        found = np.empty(len(rows), dtype=np.int64)

        def draw_tile(part: slice) -> None:
            tile = _copy_rows(logits, rows[part])
            if bits is not None:
                forbid(tile, bits[part])
            if settings is None:
                found[part] = _argmax(tile)
                return
            bias(tile, draws[part])
            penalise(tile, draws[part])
            if self.draw is not None:
                found[part] = self.draw(tile, settings[:, part], range(len(tile))).cpu().numpy()
            else:
                found[part] = choose(tile, SamplerColumns(*settings[:, part].to(tile.device))).cpu().numpy()

        self._for_tiles(len(rows), logits, draw_tile, None if self.draw is None else COPIED_BYTES_PER_LOGIT)
        return found

    def _logprobs(self, logits: Tensor, draws: Sequence[Draw], token_ids: list[int]) -> dict[int, TokenLogprob]:
        wanted = {
            row: draw.params.logprobs
            for row, draw in enumerate(draws)
            if draw.params.logprobs is not None and token_ids[row] != NO_TOKEN
        }
        logprobs: dict[int, TokenLogprob] = {}
        if not (rows := list(wanted)):
            return logprobs

        def find(part: slice) -> None:
            chosen, nums = [token_ids[row] for row in rows[part]], [wanted[row] for row in rows[part]]
            logprobs.update(zip(rows[part], token_logprobs(_copy_rows(logits, rows[part]), chosen, nums), strict=True))

        self._for_tiles(len(rows), logits, find)
        return logprobs

    def _for_tiles(self, num_rows: int, logits: Tensor, work: Callable[[slice], None], each: int | None = None) -> None:
        """Calls `work` for tiles of rows, whose temporaries take `each` bytes a logit."""
        of_row = (each or (CPU_BYTES_PER_LOGIT if logits.is_cpu else BYTES_PER_LOGIT)) * logits.shape[-1]
        threads = 1 if self.compute is None else self.compute.num_workers
        per_tile = max(1, self.scratch_nbytes // (threads * of_row))
        tiles = [slice(start, start + per_tile) for start in range(0, num_rows, per_tile)]
        at_once = min(threads, len(tiles), self.scratch_nbytes // (per_tile * of_row))

        def run(some: list[slice], _: object = None) -> None:
            for tile in some:
                work(tile)

        if self.compute is None or at_once < 2:
            run(tiles)
        else:
            self.compute.parallel_for([tiles[first::at_once] for first in range(at_once)], run)


def _argmax(logits: Tensor) -> NDArray[np.int64]:
    """The first largest logit of each row, in one read: NaN counts as the largest, which reveals broken rows."""
    found = argmax(logits)
    if found is not None:
        return found.masked_fill_(found < 0, NO_TOKEN).numpy()
    peaks, ids = logits.max(dim=-1)
    return ids.masked_fill_(~peaks.isfinite(), NO_TOKEN).cpu().numpy()


def _copy_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, in fp32."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device)).float()


def _settings(draws: Sequence[Draw], vocab_size: int) -> Tensor:
    """`SamplerColumns` of R draws, [5, R, 1], of all tiles: computing them for one row takes as long."""
    stream = [(draw.params.seed, draw.sample, draw.position) for draw in draws]
    numbers = uniform(*np.array(stream, dtype=np.uint64).T)
    filters = np.array([_filters(draw, vocab_size) for draw in draws])
    return torch.from_numpy(np.vstack([filters.T, numbers])).unsqueeze(-1)


def _filters(draw: Draw, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p and min-p as in `SamplerColumns`."""
    params = draw.params
    if params.greedy:
        return 1.0, 1.0, 1.0, 0.0
    return params.temperature, min(params.top_k or vocab_size, vocab_size), params.top_p, params.min_p
