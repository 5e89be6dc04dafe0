"""From a pass's logits to its tokens, in tiles of bounded memory. Knows no model and no text.

Logits are changed first: biases, penalties for tokens that were used, and masks of a grammar.

Log-probabilities are the model's own: penalties, filters and masks decide which token is drawn, not its probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .choose import Settings, choose, token_logprobs
from .draw import NO_TOKEN, Draw, Sampled, uniform
from .params import TokenLogprob


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


# The most bytes of temporaries per logit of a tile: 55 on a CPU, when all rows need a full sort. The rest is for the
# allocations of a device's sort.
BYTES_PER_LOGIT = 96
# Logits that are widened to fp32 at a time where only the largest is wanted: 1 MiB.
CACHED_LOGITS = 1 << 18


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws one token per row, which depends on the row's own logits and `Draw` alone, to the last bit.

    Temporaries stay below `scratch_nbytes`, or take what a single row needs if that is more.
    """

    # On a CPU a plane of fp32 then stays below 1 MiB and in the cache: larger ones are mapped anew each time.
    scratch_nbytes: int = 24 << 20

    def sample(self, logits: Tensor, draws: Sequence[Draw], masks: TokenMasks | None = None) -> Sampled:
        """Draws one token for each row of `logits` [B, V], of any dtype and on any device; does not change them.

        A row gets `NO_TOKEN` and no logprobs if its logits contain NaN or +inf, or only -inf where its mask allows
        tokens. Raises ValueError unless there is one draw per row.
        """
        if len(draws) != len(logits):
            raise ValueError(f"Got logits of {len(logits)} rows and {len(draws)} draws; pass one draw per row.")
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
        scores: list[TokenLogprob | None] = []
        last = logits.shape[-1] - 1
        for part in self._tiles(len(token_ids), logits.shape[-1]):
            broken = _argmax(logits[part]) == NO_TOKEN
            ids = [min(token_id, last) for token_id in token_ids[part]]
            found = token_logprobs(logits[part].float(), ids, num_top[part])
            scores += [None if bad else each for bad, each in zip(broken, found, strict=True)]
        return tuple(
            replace(score, token_id=token_id, logprob=-math.inf, rank=last + 2) if score and token_id > last else score
            for score, token_id in zip(scores, token_ids, strict=True)
        )

    def _draw_rows(
        self, logits: Tensor, rows: list[int], draws: Sequence[Draw], bits: Tensor | None
    ) -> NDArray[np.int64]:
        """The tokens of `rows`, tile by tile; each row has a draw, and a mask unless `bits` is None."""
        vocab_size = logits.shape[-1]
        settings = None if all(draw.is_argmax for draw in draws) else _settings(draws, vocab_size).to(logits.device)
        found = []
        for part in self._tiles(len(rows), vocab_size):
            tile = _copy_rows(logits, rows[part])
            if bits is not None:
                forbid(tile, bits[part])
            if settings is None:
                found.append(_argmax(tile))
                continue
            bias(tile, draws[part])
            penalise(tile, draws[part])
            found.append(choose(tile, Settings(*settings[:, part])).cpu().numpy())
        return np.concatenate(found)

    def _logprobs(self, logits: Tensor, draws: Sequence[Draw], token_ids: list[int]) -> dict[int, TokenLogprob]:
        wanted = {
            row: draw.params.logprobs
            for row, draw in enumerate(draws)
            if draw.params.logprobs is not None and token_ids[row] != NO_TOKEN
        }
        logprobs: dict[int, TokenLogprob] = {}
        rows = list(wanted)
        for part in self._tiles(len(rows), logits.shape[-1]):
            chosen, nums = [token_ids[row] for row in rows[part]], [wanted[row] for row in rows[part]]
            logprobs.update(zip(rows[part], token_logprobs(_copy_rows(logits, rows[part]), chosen, nums), strict=True))
        return logprobs

    def _tiles(self, num_rows: int, vocab_size: int) -> Iterator[slice]:
        per_tile = max(1, self.scratch_nbytes // (BYTES_PER_LOGIT * vocab_size))
        return (slice(start, start + per_tile) for start in range(0, num_rows, per_tile))


def _argmax(logits: Tensor) -> NDArray[np.int64]:
    """The first largest logit of each row, in one read: NaN counts as the largest, which reveals broken rows."""
    if logits.device.type == "cpu":
        # Rows are widened a few at a time, in the cache: all of them would be memory that is mapped anew in every pass.
        few = max(1, CACHED_LOGITS // logits.shape[-1])
        return np.concatenate([_argmax_of(rows.float().numpy()) for rows in torch.split(logits, few)])
    peaks, ids = logits.max(dim=-1)
    return ids.masked_fill_(~peaks.isfinite(), NO_TOKEN).cpu().numpy()


def _argmax_of(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """`_argmax` of logits in host memory. numpy's is vectorised, torch's is not; both propagate NaN."""
    token_ids = np.argmax(logits, axis=-1)
    largest = np.take_along_axis(logits, token_ids[:, np.newaxis], axis=-1).squeeze(-1)
    return np.where(np.isfinite(largest), token_ids, NO_TOKEN)


def _copy_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows, in fp32."""
    return logits.index_select(0, torch.tensor(rows, device=logits.device)).float()


def _settings(draws: Sequence[Draw], vocab_size: int) -> Tensor:
    """The columns of `Settings` for R draws, [5, R, 1], of all tiles: computing them for one row takes as long."""
    stream = [(draw.params.seed, draw.sample, draw.position) for draw in draws]
    numbers = uniform(*np.array(stream, dtype=np.uint64).T)
    filters = np.array([_filters(draw, vocab_size) for draw in draws])
    return torch.from_numpy(np.vstack([filters.T, numbers])).unsqueeze(-1)


def _filters(draw: Draw, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p and min-p as in `Settings`."""
    params = draw.params
    if params.greedy:
        return 1.0, 1.0, 1.0, 0.0
    return params.temperature, min(params.top_k or vocab_size, vocab_size), params.top_p, params.min_p
