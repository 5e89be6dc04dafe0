"""What one row of a pass hands the sampler, and what it gets back. Knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .history import TokenHistory
from .params import SamplingParams

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Draw:
    """The row's settings, and where on its own random stream it stands.

    `sample` tells the continuations of one prompt apart; `position` counts the tokens it already produced.
    `history` holds prompt and output so far, and is needed exactly if `params.penalised`.
    """

    params: SamplingParams
    sample: int
    position: int
    history: TokenHistory | None = None

    def __post_init__(self) -> None:
        if self.history is None and self.params.penalised:
            raise ValueError("A draw with penalties has no token history; pass the TokenHistory of its sequence.")

    @property
    def is_argmax(self) -> bool:
        """Whether the row's token is the first largest logit, with nothing to compute before."""
        return self.params.greedy and not self.params.penalised


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms under softmax of the model's own logits: before penalties, temperature and filters.

    `rank` is 1 for the most likely token. `top` holds the most likely tokens, best first, lower id first among
    equals; tokens with a logit of -inf never appear, so it can be shorter than asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [B], `NO_TOKEN` where a row's logits were broken; `logprobs` by row, for rows that asked."""

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprob]
