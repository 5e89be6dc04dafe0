"""Probabilities as whole numbers. Knows how likely a token is, not which tokens may be drawn.

Whole numbers that sum to at most 2**53 are added exactly by float64, in any order: no total depends on how a
kernel groups its terms, and so not on batch size, row number, alignment or threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def unit(vocab_size: int) -> float:
    """The weight of a row's most likely token: the largest power of two of which `vocab_size` sum to 2**53."""
    return 2.0 ** (53 - (vocab_size - 1).bit_length())


def weights(distances: Tensor, temperature: Tensor, vocab_size: int) -> Tensor:
    """exp(-distance / temperature) in whole `unit`ths: fp32, shaped as `distances` [R, N]; temperature [R, 1].

    With 262,144 tokens the unit is 2**35: what is 2**36 times less likely than the best token is never drawn.
    """
    # The bounds keep 0 / temperature and inf / temperature from being NaN.
    bounded = temperature.clamp(1e-37, 1e37).to(torch.float32)
    return (distances / -bounded).exp_().mul_(unit(vocab_size)).round_()


def total(weights_: Tensor) -> Tensor:
    """Sum of each row, float64 [R, 1], exact."""
    if weights_.device.type == "cpu":
        # torch would first make a copy of everything in float64.
        return torch.from_numpy(np.add.reduce(weights_.numpy(), axis=-1, dtype=np.float64, keepdims=True))
    return weights_.sum(dim=-1, keepdim=True, dtype=torch.float64)
