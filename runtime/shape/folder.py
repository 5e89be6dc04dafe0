"""The shape of a checkpoint folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.uncollected import uncollected
from .config import ModelConfig
from .contradictions import check_tensors
from .model_shape import ModelShape
from .read import by_layer, model_shape


def read_shape(folder: Path) -> ModelShape:
    """The shape of a checkpoint from its config and headers, if they agree; reads no weight.

    Raises UnsupportedModel for what cannot run here, BadCheckpoint for what is damaged, incomplete or contradictory.
    """
    config = ModelConfig.read(folder)
    with uncollected(), Checkpoint(folder) as checkpoint:
        tensors = by_layer(config, checkpoint.entries)
        check_tensors(config, checkpoint, tensors)
        return model_shape(config, checkpoint.entries, tensors)
