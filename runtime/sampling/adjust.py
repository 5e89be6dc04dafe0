"""Changes logits before a token is drawn: biases, penalties for tokens that were used, and masks of a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .draw import Draw


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
