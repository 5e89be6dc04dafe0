"""Refuses weights that no format can hold: NaN and infinity."""

import torch
from torch import Tensor

from .format import FormatError


def refuse_nonfinite(weight: Tensor, extremes: Tensor) -> None:
    """Raises FormatError if `extremes` of (parts of) `weight` show that it holds NaN or infinity.

    They are enough, since a maximum inherits both, and far fewer than the weights.
    """
    if not torch.isfinite(extremes).all():
        count = weight.numel() - int(torch.isfinite(weight).sum())
        raise FormatError(
            f"{count} NaN or infinite weights were found in a matrix {list(weight.shape)}; finite ones are wanted."
            " The checkpoint is damaged or was saved from a diverged run: get it anew."
        )
