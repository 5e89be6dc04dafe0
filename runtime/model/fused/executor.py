"""The executor of models whose decoder the library computes as a whole."""

from __future__ import annotations

import torch
from torch import nn

from ....quant.matmul.matmul import ParallelMatmul
from ...engine.sequence import Batch
from ..executor import SeamExecutor
from ..runner import ModelRunner
from .decoder import FusedDecoder


class FusedExecutor:
    """Passes of generated tokens by `decoder`, between the model's embedding and its head; others by the seams.

    A self-test at load has shown that it gives the bits of the model's own forward.
    """

    def __init__(self, runner: ModelRunner, decoder: FusedDecoder, compute: ParallelMatmul) -> None:
        """Raises AttributeError for a model without such modules."""
        model = runner.model.get_decoder()
        self.decoder = decoder
        self._seams: SeamExecutor = runner.seams
        self._compute = compute
        self._embedding: nn.Module = runner.model.get_input_embeddings()
        self._rotary: nn.Module = model.rotary_emb
        self._norm: nn.Module = model.norm
        self._head = runner.head

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`."""
        slots = self.decoder.begin(batch)
        if slots is None:
            return self._seams.forward(batch)
        hidden: torch.Tensor = self._embedding(batch.token_ids)
        with self._compute.small_steps(hidden.numel()):
            cos, sin = self._rotary(hidden, batch.positions)
            hidden = self._norm(self.decoder.forward(hidden, cos, sin, slots))
            logits: torch.Tensor = self._head(hidden[:, batch.logit_rows])
        return logits.squeeze(0)
