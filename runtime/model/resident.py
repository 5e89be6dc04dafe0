"""A model's small parameters on the device where it computes; the embedding stays in the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class HostEmbedding(nn.Module):
    """Gathers rows in host memory and copies them alone: of an embedding a pass reads one row per token."""

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._device = device

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.inner(token_ids)
        return rows.to(self._device)


def move_resident(model: PreTrainedModel, device: torch.device) -> None:
    """Norms, routers, biases and buffers to `device`. The output head is bound later and stays where it is."""
    embedding = model.get_input_embeddings()
    staying = {*embedding.modules(), model.get_output_embeddings()}
    for module in model.modules():
        if module in staying:
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    model.set_input_embeddings(HostEmbedding(embedding, device))
