"""A loaded model: transformers' definition over packed weights, one call per pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ...quant.kernels.upload import upload
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.scratch import whole_vectors
from ..attention.protocol import AttentionBackend
from ..engine.batch import Batch
from .attention_seam import PackedPass
from .recurrent.pass_states import PassStates
from .weights_seam import Stack


class ModelRunner:
    """Runs passes on the device of `compute`; set `attention` after the cache exists and before the first pass.

    `states` are those of its recurrent layers, whose pool is set with `attention`. `stack` computes all layers at once
    in passes that it takes; with `direct`, what is in front of them and behind them is then called one by one.
    """

    def __init__(self, model: PreTrainedModel, compute: ParallelMatmul, states: PassStates | None = None) -> None:
        self._model = model.requires_grad_(False)
        self._compute = compute
        self.attention: AttentionBackend | None = None
        self.stack: Stack | None = None
        self.direct = False
        self.states = states

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, which a pass calls in this order."""
        return list(self._model.get_decoder().layers.children())

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head: nn.Module = self._model.get_output_embeddings()
        return head

    def use(self, stack: Stack | None) -> None:
        """Lets `stack` compute all layers of the passes that it takes."""
        self.stack = self._model.get_decoder().layers.stack = stack
        self.direct = False

    def in_floats(self) -> AbstractContextManager[None]:
        """While entered, products round no activation (ParallelMatmul.in_floats)."""
        return self._compute.in_floats()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in the dtype of the output head, on the device."""
        if self.attention is None:
            raise RuntimeError("no attention backend: set `attention` before the first pass")
        count, compute = batch.num_tokens, self._compute
        behind = (0, whole_vectors(count) - count if compute.pads_passes else 0)
        token_ids, positions = F.pad(batch.token_ids, behind), F.pad(batch.positions, behind)
        taken = self.stack is not None and self.stack.begin(batch)
        if self.states is not None:
            self.states.begin(batch, compute.device)
        # Token ids stay in host memory, where the embedding is.
        with compute.small_steps(count * self._model.config.hidden_size), compute.padded_pass(count, count + behind[1]):
            if taken and self.direct:
                return self._directly(batch)
            out = self._model(
                token_ids,
                position_ids=upload(positions, compute.device),
                use_cache=False,
                logits_to_keep=upload(batch.logit_rows, compute.device),
                packed=PackedPass(batch, self.attention, positions),
            )
        logits: torch.Tensor = out.logits
        return logits.squeeze(0)

    def _directly(self, batch: Batch) -> torch.Tensor:
        """A pass that the stack takes, by a model's modules: as a self-test at load shows, its forward does no more."""
        assert self.stack is not None
        decoder: Any = self._model.get_decoder()
        hidden = self._model.get_input_embeddings()(batch.token_ids)
        hidden = self.stack(hidden, position_embeddings=decoder.rotary_emb(hidden, batch.positions))
        logits: torch.Tensor = self._model.get_output_embeddings()(decoder.norm(hidden)[:, batch.logit_rows])
        return logits.squeeze(0)
