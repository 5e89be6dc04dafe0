"""Refuses weights that no format can hold: NaN and infinity."""

import torch
from torch import Tensor

from .format import FormatError


def refuse_nonfinite(weight: Tensor, absmax: Tensor) -> None:
    """Raises FormatError if `absmax`, maxima of |weight|, shows that weights are NaN or infinite.

    The maxima are enough, since they inherit both, and there are far fewer of them.
    """
    if not torch.isfinite(absmax).all():
        count = weight.numel() - int(torch.isfinite(weight).sum())
        raise FormatError(
            f"{count} NaN or infinite weights were found in a matrix {list(weight.shape)}; finite ones are wanted."
            " The checkpoint is damaged or was saved from a diverged run: get it anew."
        )
