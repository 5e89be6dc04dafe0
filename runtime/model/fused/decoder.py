"""Computes all decoder layers of a pass of generated tokens and short prompts in one call of the library: these models'
executor.

Where experts stream, a call ends when a layer has chosen its experts, and the next one begins by adding them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ....quant.matmul.matmul import ParallelMatmul
from ....quant.matmul.steps import Step, Steps
from ...attention.native_rows import AttentionSteps
from ...attention.protocol import AttentionBackend
from ...attention.torch_backend import TorchAttention
from ...engine.sequence import Batch
from ..runner import ModelRunner, SeamExecutor
from .layer import FusedLayer, LayerSteps


class _Composed(NamedTuple):
    """The steps of all layers for a rotary embedding of `rotary` elements, and their runs: one for all layers, and one
    more for each layer whose experts stream."""

    rotary: int
    layers: list[LayerSteps]
    runs: list[Steps]


class FusedDecoder:
    """Computes all layers in passes that `begin` takes. `taken` counts them."""

    def __init__(
        self, layers: Sequence[FusedLayer], compute: ParallelMatmul, attention: AttentionSteps, attended: Tensor
    ) -> None:
        """`attention` writes to `attended` [T, Hq, D]; it reads the layers' queries."""
        self.layers = tuple(layers)
        self.taken = 0
        # A layer's result takes the memory of its input, the first and the last excepted.
        self._stream = torch.empty_like(layers[0].buffers.total)
        self._attended = attended
        self._compute = compute
        self._attention = attention
        self._composed: _Composed | None = None

    @classmethod
    def of(cls, layers: Sequence[FusedLayer], compute: ParallelMatmul, backend: AttentionBackend | None) -> Self | None:
        """The layers together; None where they differ in size, or where attention is not computed by steps."""
        buffers = layers[0].buffers
        if not isinstance(backend, TorchAttention) or any(layer.buffers is not buffers for layer in layers):
            return None
        attended = torch.empty_like(buffers.q)
        attention = backend.steps([layer.call for layer in layers], buffers.q, attended, compute.num_workers)
        return None if attention is None else cls(layers, compute, attention, attended)

    def begin(self, batch: Batch) -> list[int] | None:
        """Gets ready for a pass: the addresses of its slots by layer. None where it has longer chunks of prompts, or
        too many rows."""
        few = 0 < batch.num_tokens <= self.layers[0].most_rows
        return self._attention.begin(batch) if few else None

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Sequence[int]) -> Tensor:
        """hidden [1, T, D] -> [1, T, D], as all layers one after the other give it; cos and sin are [1, T, rotary]."""
        assert self.layers[0].takes(hidden, (cos, sin)), "the self-test's pass had such numbers"
        composed = self._composed
        if composed is None or composed.rotary != cos.shape[-1]:
            composed = self._composed = self._compose(cos.shape[-1])
        rows, out = hidden.shape[1], torch.empty_like(hidden)
        source, stream = hidden.data_ptr(), self._stream.data_ptr()
        for layer, layer_slots in zip(composed.layers, slots, strict=True):
            layer.reads(source, cos.data_ptr(), sin.data_ptr())
            layer.slots(layer_slots)
            source = stream
        composed.layers[-1].writes(out.data_ptr())
        first, *others = composed.runs
        first.run(rows, self._compute.call_on_all)
        streaming = [at for at, each in enumerate(self.layers) if each.streams]
        for at, run in zip(streaming, others, strict=True):
            groups = self.layers[at].add_experts(rows, composed.layers[at])
            run.run(rows, self._compute.call_on_all)
            del groups
        for each in self.layers:
            each.count(rows)
        self.taken += 1
        return out

    def _compose(self, rotary: int) -> _Composed:
        attention = self._attention
        layers = [layer.steps(rotary, attention.block) for layer in self.layers]
        runs: list[list[Step]] = [[]]
        for index, layer in enumerate(layers):
            layer.stores(*attention.codes(index))
            layer.attended(self._attended.data_ptr())
            layer.writes(self._stream.data_ptr())
            attended = (Step(attention.attend[index]), Step(attention.reduce[index], kind="reduce"))
            runs[-1] += [*layer.before, *attended, *layer.behind]
            if self.layers[index].streams:
                runs.append([])
            runs[-1].append(layer.last)
        return _Composed(rotary, layers, [Steps(each) for each in runs])


class FusedExecutor:
    """Passes of generated tokens and short prompts by `decoder`, between the model's embedding and its head; others by
    the seams.

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
