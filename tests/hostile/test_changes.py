"""A checkpoint that changes while it is prepared (`runtime/weights/preparation.py`, `offload/checkpoint/checkpoint.py`)
gives no model: what was read may be of two different ones.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.errors import BadCheckpoint
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.runtime.model.definition import define
from moedge.runtime.plan.placement import everything
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.shards import model_shards
from moedge.runtime.weights.memory import WeightMemory
from moedge.runtime.weights.preparation import MemorySink, Preparation


class MeddlingSink(MemorySink):
    """Changes the weights before the second layer is read."""

    def __init__(self, memory: WeightMemory, meddle: Callable[[], object]) -> None:
        super().__init__(memory)
        self._meddle = meddle

    def has_layer(self, index: int) -> bool:
        if index == 1:
            self._meddle()
        return False


def prepare(folder: Path, meddle: Callable[[Path], object]) -> None:
    shape = read_shape(folder)
    model = define(ModelConfig.read(folder), torch.float32)
    shards = model_shards(shape, "none", "fp32")
    memory = WeightMemory(shards, everything(shards))
    sink = MeddlingSink(memory, lambda: meddle(folder / "model.safetensors"))
    with Checkpoint(folder) as checkpoint:
        Preparation(model, checkpoint, ParallelMatmul(Workspace(0))).run(shards, sink)


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new")).rename(path)


@pytest.mark.parametrize("meddle", [replace, os.utime, os.remove, lambda path: os.truncate(path, 5000)])
def test_a_change_is_a_refusal(meddle: Callable[[Path], object], good_folders: Sequence[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(good_folders[0], tmp_path / "copy")
    with pytest.raises(BadCheckpoint, match="changed while it was read"):
        prepare(folder, meddle)


def test_no_change_is_none(good_folders: Sequence[Path]) -> None:
    prepare(good_folders[0], lambda path: None)
