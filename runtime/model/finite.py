"""Refuses parameters that hold NaN or infinity, for those that no format packs: norms, embedding, routers, biases."""

from __future__ import annotations

import torch
from torch import nn

from ...offload.errors import BadCheckpoint


def refuse_nonfinite(model: nn.Module) -> None:
    """Raises BadCheckpoint, naming the parameter, unless all loaded parameters are finite."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        # Both ends inherit NaN and infinity, and cost a fraction of a test of every element.
        if not torch.stack(torch.aminmax(parameter.detach())).isfinite().all():
            count = parameter.numel() - int(parameter.isfinite().sum())
            raise BadCheckpoint(
                f"{name}: {count} of {parameter.numel()} values are NaN or infinite, finite ones are wanted; "
                "the checkpoint is damaged or was saved from a diverged run, get it anew"
            )
