"""Fills a meta model's parameters from a checkpoint, a layer at a time, by transformers' own conversions.

The only file that uses non-public names of transformers; tests/runtime/model/test_loading.py names the day they change.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ...offload.checkpoint import Checkpoint
from ...offload.errors import BadCheckpoint

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointLoader:
    """Loads one layer's parameters, or those outside all layers; memory peaks at what one call loads."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._model = model
        self._checkpoint = checkpoint
        # A bar for every layer would bury the progress of the job.
        logging.disable_progress_bar()
        self._config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), dtype=dtype)
        self._names: dict[int | None, list[str]] = defaultdict(list)
        for name in checkpoint.entries:
            match = _LAYER.search(name)
            self._names[int(match[1]) if match else None].append(name)

    def load_layer(self, index: int, layer: nn.Module) -> None:
        self._load(index)
        if missing := [name for name, parameter in layer.named_parameters() if parameter.is_meta]:
            raise BadCheckpoint(f"layer {index}: {len(missing)} parameters are not in the files, first {missing[:3]}")

    def load_rest(self) -> None:
        """Everything that is not of a layer: embedding, last norm, output head."""
        self._load(None)
        self._model.tie_weights()
        meta = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        if outside := [name for name in meta if not _LAYER.search(name)]:
            raise BadCheckpoint(f"{len(outside)} parameters are not in the files, first {outside[:3]}")

    def _load(self, index: int | None) -> None:
        tensors = {name: _StoredTensor(self._checkpoint, name) for name in self._names[index]}
        found, _ = convert_and_load_state_dict_in_model(self._model, tensors, self._config, None)
        if found.conversion_errors or found.error_msgs:
            raise BadCheckpoint(f"tensors could not be converted: {found.conversion_errors or found.error_msgs}"[:600])
        if found.mismatched_keys:
            name, have, want = sorted(found.mismatched_keys)[0]
            raise BadCheckpoint(f"tensor {name} has shape {list(have)}, config.json wants {list(want)}")
        if unexpected := sorted(name for name in found.unexpected_keys if not _is_known_extra(name)):
            raise BadCheckpoint(f"{len(unexpected)} tensors belong to no part of the model, first {unexpected[:3]}")


class _StoredTensor:
    """What transformers' loader indexes with `[...]` when it wants the tensor's bytes."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def __getitem__(self, index: Any) -> torch.Tensor:
        entry = self._checkpoint.entries[self._name]
        if entry.dtype not in _DTYPES:
            raise BadCheckpoint(f"tensor {self._name} is {entry.dtype}, wanted one of {', '.join(_DTYPES)}")
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        if entry.nbytes:
            self._checkpoint.read_into(self._name, tensor.view(-1).view(torch.uint8).numpy().data)
        return tensor[index]


def _is_known_extra(name: str) -> bool:
    """Buffers that old checkpoints carry and the model computes itself, and heads that are tied."""
    return name.endswith(("rotary_emb.inv_freq", "lm_head.weight"))
