"""Reads and packs all weights of a checkpoint, as a job does before its first pass."""

from pathlib import Path

import torch

from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.runtime.model.definition import define
from moedge.runtime.plan.placement import everything
from moedge.runtime.shape.checkpoint_shape import open_checkpoint, read_config, read_tensors
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.shape.shards import model_shards
from moedge.runtime.weights.memory import WeightMemory
from moedge.runtime.weights.preparation import MemorySink, Preparation


def load_weights(folder: Path, shape: ModelShape) -> None:
    config = read_config(folder)
    model = define(config, torch.float32)
    with open_checkpoint(config, folder) as checkpoint:
        shards = model_shards(shape, "none", "fp32")
        sink = MemorySink(WeightMemory(shards, everything(shards)))
        tensors = read_tensors(config, checkpoint)
        Preparation(model, checkpoint, ParallelMatmul(Workspace(0)), tensors=tensors).run(shards, sink)
