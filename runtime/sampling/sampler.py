"""From a pass's logits to its tokens: which rows need what, in tiles of bounded memory. Knows no model and no text.

Log-probabilities are the model's own: penalties, filters and masks decide what is taken, not how likely it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .choice import Settings, choose
from .draw import NO_TOKEN, Draw, Sampled, TokenLogprob
from .logprobs import token_logprobs
from .masks import TokenMasks, forbid
from .penalties import penalise
from .random import uniform

# Most bytes of temporaries that one logit of a tile has at a time: 55 on a CPU, where all rows need a full sort. The
# rest is for what a device's sort allocates.
BYTES_PER_LOGIT = 96


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws one token per row; what a row gets depends on its own logits and `Draw` alone, to the last bit.

    Temporaries stay below `scratch_nbytes`, or one row's where a single row needs more.
    """

    scratch_nbytes: int = 64 << 20

    def sample(self, logits: Tensor, draws: Sequence[Draw], masks: TokenMasks | None = None) -> Sampled:
        """One token for each row of `logits` [B, V] fp32, on any device; the logits are left as they are.

        A row whose logits hold NaN or +inf, or nothing but -inf where its mask allows tokens, gets `NO_TOKEN` and no
        logprobs.
        """
        if len(draws) != len(logits):
            raise ValueError(f"Got logits of {len(logits)} rows and {len(draws)} draws; pass one draw per row.")
        masked = {row: index for index, row in enumerate(masks.rows)} if masks is not None else {}
        steered = [row for row, draw in enumerate(draws) if row not in masked and not draw.is_argmax]
        idle = len(steered) + len(masked) < len(draws)
        token_ids = _argmax(logits) if idle else np.full(len(draws), NO_TOKEN)
        for rows in self._tiles(steered, logits.shape[-1]):
            token_ids[rows] = _pick(_copy_rows(logits, rows), [draws[row] for row in rows])
        if masks is not None:
            for rows in self._tiles(list(masked), logits.shape[-1]):
                tile = _copy_rows(logits, rows)
                forbid(tile, masks.bits[[masked[row] for row in rows]])
                token_ids[rows] = _pick(tile, [draws[row] for row in rows])
        return Sampled(token_ids, self._logprobs(logits, draws, token_ids.tolist()))

    def _logprobs(self, logits: Tensor, draws: Sequence[Draw], token_ids: list[int]) -> dict[int, TokenLogprob]:
        wanted = {
            row: draw.params.logprobs
            for row, draw in enumerate(draws)
            if draw.params.logprobs is not None and token_ids[row] != NO_TOKEN
        }
        logprobs: dict[int, TokenLogprob] = {}
        for rows in self._tiles(list(wanted), logits.shape[-1]):
            chosen = [token_ids[row] for row in rows]
            of_tile = token_logprobs(_copy_rows(logits, rows), chosen, [wanted[row] for row in rows])
            logprobs.update(zip(rows, of_tile, strict=True))
        return logprobs

    def _tiles(self, rows: list[int], vocab_size: int) -> Iterator[list[int]]:
        per_tile = max(1, self.scratch_nbytes // (BYTES_PER_LOGIT * vocab_size))
        return (rows[start : start + per_tile] for start in range(0, len(rows), per_tile))


def _pick(tile: Tensor, draws: Sequence[Draw]) -> NDArray[np.int64]:
    """One token for each row of a tile, which is a copy to be spoiled."""
    if all(draw.is_argmax for draw in draws):
        return _argmax(tile)
    penalise(tile, draws)
    return choose(tile, _settings(draws, tile)).cpu().numpy()


def _argmax(logits: Tensor) -> NDArray[np.int64]:
    """The first largest logit of each row, all rows in one read: max propagates NaN, so it tells broken rows too."""
    largest, token_ids = logits.max(dim=-1)
    return token_ids.masked_fill_(~largest.isfinite(), NO_TOKEN).cpu().numpy()


def _copy_rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _settings(draws: Sequence[Draw], tile: Tensor) -> Settings:
    """The columns of a tile [R, V], on its device, after one copy."""
    stream = [(draw.params.seed, draw.sample, draw.position) for draw in draws]
    numbers = uniform(*np.array(stream, dtype=np.uint64).T)
    filters = np.array([_filters(draw, tile.shape[-1]) for draw in draws])
    table = torch.from_numpy(np.column_stack([filters, numbers])).to(tile.device)
    return Settings(*table.unsqueeze(-1).unbind(dim=1))


def _filters(draw: Draw, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p and min-p as `Settings` wants them."""
    params = draw.params
    if params.greedy:
        return 1.0, 1.0, 1.0, 0.0
    return params.temperature, min(params.top_k or vocab_size, vocab_size), params.top_p, params.min_p
