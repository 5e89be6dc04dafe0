"""The multi-token prediction (MTP) head of a checkpoint: one more decoder layer, which drafts tokens.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv:2412.19437, section 2.2): with t[i + 1] behind position i

    h'[i] = layer(eh_proj [enorm(embed(t[i + 1])); hnorm(h[i])]),    draft of t[i + 2] = head(shared_head.norm(h'[i]))

The layer attends to positions before it, so that it has keys and values of all tokens, in the cache beside those of the
other layers. Embedding and output head are the model's. h is what the output head reads, behind the model's last norm:
that is what DeepSeek's and GLM's heads were trained on. A further token is drafted from shared_head.norm(h'[i]) in the
same way (github.com/ROCm/ATOM/pull/1764 and vllm-project/vllm/pull/47448 have the acceptance of both ways).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...moe.expert_cache import StreamedExperts
from ...quant.kernels.upload import upload
from ...quant.matmul.matmul import ParallelMatmul
from ..attention.protocol import AttentionBackend
from ..engine.sequence import Batch
from .attention_seam import PackedPass, Visibility
from .experts_seam import PackedExperts


def add_head(model: Any) -> None:
    """Gives the last decoder layer what the head has beside it, under the names of checkpoints; nothing has memory."""
    layer = model.get_decoder().layers[-1]
    norm, hidden = layer.input_layernorm, model.config.hidden_size
    with torch.device("meta"):
        layer.enorm, layer.hnorm, shared = (type(norm)(hidden, norm.variance_epsilon) for _ in range(3))
        layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = shared
    layer.to(model.dtype)


class MtpHead:
    """Computes passes of the head behind those of its model; `hidden` [T, D] is what the last of these gave it.

    Set `attention` as the runner's.
    """

    def __init__(self, model: PreTrainedModel, compute: ParallelMatmul) -> None:
        decoder: Any = model.get_decoder()
        self.attention: AttentionBackend | None = None
        self.hidden = torch.empty(0)
        self._layers = decoder.layers
        self._embedding: nn.Module = model.get_input_embeddings()
        self._rotary: nn.Module = decoder.rotary_emb
        self._head: nn.Module = model.get_output_embeddings()
        self._compute = compute
        decoder.norm.register_forward_hook(self._keep)

    def _keep(self, norm: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.hidden = out.squeeze(0)

    def leave(self) -> None:
        """Between two passes: it is not called any more, and nothing is read for it."""
        self._layers.leave_head()

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: torch.Tensor, again: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens [R], in host memory, and the states [R, D] to draft on from, of `logit_rows`.

        Each token of `batch` is the one behind the position that it has there, whose state is in `hidden` [T, D].
        `again`: it is called once more before the model's next pass.
        """
        assert self.attention is not None
        compute, count, layer = self._compute, batch.num_tokens, self._layers.head()
        for module in layer.modules():
            if isinstance(module, PackedExperts) and isinstance(module.source, StreamedExperts):
                module.source.cache.order.stays = again
        with compute.small_steps(2 * hidden.numel()), compute.padded_pass(count, count):
            embedded = layer.enorm(self._embedding(batch.token_ids))
            inputs = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden.unsqueeze(0))], -1))
            positions = upload(batch.positions, compute.device)
            found = layer(
                inputs,
                attention_mask=Visibility(None),
                position_ids=positions,
                position_embeddings=self._rotary(inputs, positions),
                packed=PackedPass(batch, self.attention, batch.positions),
            )
            states = layer.shared_head.norm(found[0, upload(batch.logit_rows, compute.device)])
            logits: torch.Tensor = self._head(states)
        return logits.argmax(-1).cpu(), states
