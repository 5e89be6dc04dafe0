"""A loaded model: transformers' definition over packed weights, one call per pass."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from transformers import PreTrainedModel

from ...quant.matmul.matmul import ParallelMatmul
from ..attention.protocol import AttentionBackend
from ..engine.sequence import Batch
from .executor import Executor, SeamExecutor
from .recurrent.pass_states import PassStates


class ModelRunner:
    """Runs passes on the device of `compute`; set `attention` after the cache exists and before the first pass.

    `executor` computes them: `seams`, until loading finds that another one computes the same (`use`). `states` are
    those of the recurrent layers, whose pool is set with `attention`.
    """

    def __init__(self, model: PreTrainedModel, compute: ParallelMatmul, states: PassStates | None = None) -> None:
        self.model = model.requires_grad_(False)
        self._compute = compute
        self.states = states
        self.seams = SeamExecutor(self.model, compute, states)
        self.executor: Executor = self.seams

    @property
    def attention(self) -> AttentionBackend | None:
        """What computes attention at the seams."""
        return self.seams.attention

    @attention.setter
    def attention(self, backend: AttentionBackend | None) -> None:
        self.seams.attention = backend

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, which a pass calls in this order."""
        return list(self.model.get_decoder().layers.children())

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def use(self, executor: Executor | None) -> None:
        """Lets `executor` compute passes; None: the seams."""
        self.executor = executor or self.seams

    def in_floats(self) -> AbstractContextManager[None]:
        """While entered, products round no activation (ParallelMatmul.in_floats)."""
        return self._compute.in_floats()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in the dtype of the output head, on the device."""
        return self.executor.forward(batch)
