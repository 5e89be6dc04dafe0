"""A loaded model: transformers' definition over packed weights, one call per pass."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ...quant.kernels.upload import upload
from ...quant.matmul.parallel import ParallelMatmul
from ..attention.protocol import AttentionBackend
from ..engine.batch import Batch
from .attention_seam import PackedPass


class ModelRunner:
    """`forward` runs a pass where `compute` does; `attention` must be set before the first one, once the cache is."""

    def __init__(self, model: PreTrainedModel, compute: ParallelMatmul) -> None:
        self._model = model.requires_grad_(False)
        self._compute = compute
        self.attention: AttentionBackend | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in fp32, on the device."""
        if self.attention is None:
            raise RuntimeError("no attention backend: set `attention` before the first pass")
        # Token ids stay in the host, where the embedding is.
        with self._compute.small_steps(batch.num_tokens * self._model.config.hidden_size):
            out = self._model(
                batch.token_ids,
                position_ids=upload(batch.positions, self._compute.device),
                use_cache=False,
                logits_to_keep=upload(batch.logit_rows, self._compute.device),
                packed=PackedPass(batch, self.attention),
            )
        logits: torch.Tensor = out.logits
        return logits.squeeze(0).float()
