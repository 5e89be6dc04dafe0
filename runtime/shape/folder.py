"""The shape of a checkpoint folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from ...offload.checkpoint import Checkpoint
from .config import ModelConfig
from .model_shape import ModelShape
from .read import model_shape


def read_shape(folder: Path) -> ModelShape:
    """The shape of a checkpoint from its config and headers; reads no weight."""
    config = ModelConfig.read(folder)
    with Checkpoint(folder) as checkpoint:
        return model_shape(config, checkpoint.entries)
