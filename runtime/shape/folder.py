"""The shape of a checkpoint folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ...offload.checkpoint.checkpoint import Checkpoint
from .config import ModelConfig
from .contradictions import check_tensors
from .model_shape import ModelShape
from .read import model_shape


def read_shape(folder: Path) -> ModelShape:
    """The shape of a checkpoint from its config and headers, if they agree; reads no weight.

    Raises UnsupportedModel for what cannot run here, BadCheckpoint for what is damaged, incomplete or contradictory.
    """
    config = ModelConfig.read(folder)
    with Checkpoint(folder) as checkpoint:
        check_tensors(config, checkpoint)
        return model_shape(config, checkpoint.entries)
