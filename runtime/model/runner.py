"""A loaded model: transformers' definition over packed weights, and the executor of its passes, chosen at load."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ...quant.kernels.upload import upload
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.scratch import whole_vectors
from ..attention.protocol import AttentionBackend
from ..engine.sequence import Batch
from .attention_seam import PackedPass
from .graphs import LayerGraphs
from .mtp import MtpHead
from .recurrent.pass_states import PassStates


class ModelExecutor(Protocol):
    """Computes passes."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in the dtype of the output head, on the device."""


class SeamExecutor:
    """Runs transformers' own forward, in which attention, linears, experts and states are moedge's at the seams.

    Set `attention` after the cache exists and before the first pass. `states` are those of recurrent layers. `graphs`,
    if not None, are recordings of the layers.
    """

    def __init__(self, model: PreTrainedModel, compute: ParallelMatmul, states: PassStates | None) -> None:
        self._model = model
        self._compute = compute
        self.attention: AttentionBackend | None = None
        self.states = states
        self.graphs: LayerGraphs | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`; padding behind its tokens where bits must not depend on a pass."""
        if self.attention is None:
            raise RuntimeError("no attention backend: set `attention` before the first pass")
        count, compute = batch.num_tokens, self._compute
        behind = (0, whole_vectors(count) - count if compute.pads_passes else 0)
        token_ids, positions = F.pad(batch.token_ids, behind), F.pad(batch.positions, behind)
        if self.states is not None:
            self.states.begin(batch, compute.device)
        # Token ids stay in host memory, where the embedding is.
        with (
            compute.small_steps(count * self._model.config.hidden_size),
            compute.padded_pass(count, count + behind[1]),
            self.graphs.of_pass(batch, self.attention) if self.graphs else nullcontext(),
        ):
            out = self._model(
                token_ids,
                position_ids=upload(positions, compute.device),
                use_cache=False,
                logits_to_keep=upload(batch.logit_rows, compute.device),
                packed=PackedPass(batch, self.attention, positions),
            )
        logits: torch.Tensor = out.logits
        return logits.squeeze(0)


class ModelRunner:
    """Runs passes on the device of `compute`; set `attention` after the cache exists and before the first pass.

    `executor` computes them: `seams`, until loading finds that another one computes the same (`use`). `states` are
    those of the recurrent layers, whose pool is set with `attention`. `mtp` is the head behind the layers, if there is
    one.
    """

    def __init__(
        self, model: PreTrainedModel, compute: ParallelMatmul, states: PassStates | None = None, mtp: bool = False
    ) -> None:
        self.model = model.requires_grad_(False)
        self._compute = compute
        self.states = states
        self.seams = SeamExecutor(self.model, compute, states)
        self.executor: ModelExecutor = self.seams
        self.mtp = MtpHead(self.model, compute) if mtp else None

    @property
    def attention(self) -> AttentionBackend | None:
        """What computes attention at the seams."""
        return self.seams.attention

    @attention.setter
    def attention(self, backend: AttentionBackend | None) -> None:
        self.seams.attention = backend
        if self.mtp is not None:
            self.mtp.attention = backend

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, which a pass calls in this order, without a head behind them."""
        layers = list(self.model.get_decoder().layers.children())
        return layers if self.mtp is None else layers[:-1]

    @property
    def head(self) -> nn.Module:
        """The output head."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    def use(self, executor: ModelExecutor | None) -> None:
        """Lets `executor` compute passes; None: the seams."""
        self.executor = executor or self.seams

    def in_floats(self) -> AbstractContextManager[None]:
        """While entered, products round no activation (ParallelMatmul.in_floats)."""
        return self._compute.in_floats()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in the dtype of the output head, on the device."""
        return self.executor.forward(batch)
