"""All decoder layers of a model in one call of the library, for passes of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....quant.matmul.matmul import ParallelMatmul
from ....quant.matmul.steps import Step, Steps
from ...attention.native_steps import AttentionSteps
from ...engine.batch import Batch
from .layer import FusedLayer, LayerSteps


class _Composed(NamedTuple):
    """The steps of all layers for a rotary embedding of `rotary` elements, and the run of all of them."""

    rotary: int
    layers: list[LayerSteps]
    together: Steps


class FusedStack:
    """Computes all layers in passes that `begin` takes. `taken` counts them."""

    def __init__(self, layers: Sequence[FusedLayer], compute: ParallelMatmul, backend: Any) -> None:
        self.layers = tuple(layers)
        self.taken = 0
        buffers = layers[0].buffers
        # A layer's result takes the memory of its input, the first and the last excepted.
        self._stream = torch.empty_like(buffers.total)
        self._attended = torch.empty_like(buffers.q)
        self._compute = compute
        calls = [layer.call for layer in layers]
        self._attention: AttentionSteps | None = backend.steps(calls, buffers.q, self._attended, compute.num_workers)
        self._composed: _Composed | None = None
        self._slots: list[int] | None = None

    @classmethod
    def of(cls, layers: Sequence[FusedLayer], compute: ParallelMatmul, backend: Any) -> FusedStack | None:
        """The layers together; None where they differ in size, or where attention is not computed by steps."""
        if not hasattr(backend, "steps") or any(layer.buffers is not layers[0].buffers for layer in layers):
            return None
        stack = cls(layers, compute, backend)
        return None if stack._attention is None else stack

    @property
    def ready(self) -> bool:
        """Whether the pass that comes next was taken."""
        return self._slots is not None

    def begin(self, batch: Batch) -> bool:
        """Gets ready for a pass; False where it has to be computed layer by layer."""
        assert self._attention is not None
        few = 0 < batch.num_tokens <= self.layers[0].most_rows
        self._slots = self._attention.begin(batch) if few else None
        return self.ready

    def __call__(self, hidden: Tensor, **named: Any) -> Tensor:
        """hidden [1, T, D] -> [1, T, D], as all layers one after the other give it."""
        slots, self._slots = self._slots, None
        cos, sin = named["position_embeddings"]
        assert slots is not None, "begin took the pass"
        assert self.layers[0].takes(hidden, (cos, sin))
        composed = self._composed
        if composed is None or composed.rotary != cos.shape[-1]:
            composed = self._composed = self._compose(cos.shape[-1])
        rows, out = hidden.shape[1], torch.empty_like(hidden)
        where, through = hidden.data_ptr(), self._stream.data_ptr()
        for layer, its_slots in zip(composed.layers, slots, strict=True):
            layer.reads(where, cos.data_ptr(), sin.data_ptr())
            layer.slots(its_slots)
            where = through
        composed.layers[-1].writes(out.data_ptr())
        composed.together.run(rows, self._compute.call_on_all)
        for each in self.layers:
            each.count(rows)
        self.taken += 1
        return out

    def _compose(self, rotary: int) -> _Composed:
        attention = self._attention
        assert attention is not None
        layers = [layer.steps(rotary, attention.block) for layer in self.layers]
        together: list[Step] = []
        for index, layer in enumerate(layers):
            self._join(index, layer)
            attended = (Step(attention.attend[index]), Step(attention.reduce[index], kind="reduce"))
            together += [*layer.before, *attended, *layer.behind]
        return _Composed(rotary, layers, Steps(together))

    def _join(self, index: int, layer: LayerSteps) -> None:
        assert self._attention is not None
        layer.stores(*self._attention.codes(index))
        layer.attended(self._attended.data_ptr())
        layer.writes(self._stream.data_ptr())
