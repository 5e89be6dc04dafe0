"""A decoder layer by the library's steps: what is before attention in one call, what is behind it in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....moe.expert import HeldExperts
from ....moe.groups import ExpertGroups
from ....quant.matmul import steps
from ....quant.matmul.matmul import ParallelMatmul
from ....quant.matmul.steps import HeadRows, Routed, Step, Steps
from ....quant.matmul.tiled import MOST_ROWS, row_nbytes
from ...attention.protocol import AttentionCall
from .structure import LayerParts

Forward = Any


class Buffers:
    """Activations of at most `rows` rows, which layers of the same sizes share: each overwrites those of the last."""

    def __init__(self, parts: LayerParts, rows: int) -> None:
        self.rows = rows
        hidden, chosen, experts = parts.hidden_size, parts.num_chosen, parts.router.shape[0]
        dim = parts.head_dim
        q, k, v = (linear.packed.shape[0] // dim for linear in parts.linears[:3])
        first = parts.source.experts[0].operands
        self.normed, self.total, self.projected = (_bf16(rows, hidden) for _ in range(3))
        self.q, self.k, self.v = (_bf16(rows, count, dim) for count in (q, k, v))
        self.outputs = _bf16(rows * chosen, hidden)
        self.logits = torch.empty(rows, experts)
        ids, tokens, places = (torch.empty(rows, chosen, dtype=torch.int64) for _ in range(3))
        self.routed = Routed(ids, torch.empty(rows, chosen), torch.zeros(experts, dtype=torch.int64), tokens, places)
        width = max(linear.packed.shape[1] for linear in parts.linears)
        # The three products of x run at the same time.
        self.packed = torch.empty(3, rows * row_nbytes(width), dtype=torch.uint8)
        self.scratch = torch.empty(rows * chosen * steps.expert_row_nbytes(first), dtype=torch.uint8)

    @staticmethod
    def nbytes(parts: LayerParts) -> int:
        """What one row takes, about."""
        hidden, chosen = parts.hidden_size, parts.num_chosen
        width = max(linear.packed.shape[1] for linear in parts.linears)
        vectors = 3 * hidden + sum(linear.packed.shape[0] for linear in parts.linears[:3]) + chosen * hidden
        expert = steps.expert_row_nbytes(parts.source.experts[0].operands)
        return 2 * vectors + 3 * row_nbytes(width) + chosen * (expert + 32) + 4 * parts.router.shape[0]

    @staticmethod
    def key(parts: LayerParts) -> tuple[object, ...]:
        """What layers that share buffers have in common."""
        first = parts.source.experts[0].operands
        shapes = tuple(tuple(linear.packed.shape) for linear in parts.linears)
        return shapes, parts.head_dim, parts.router.shape, parts.num_chosen, first[0].shape, first[2].shape


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


class FusedLayer:
    """Replaces the `forward` of a decoder layer for passes of few rows; for others it calls the one that it replaced.

    `call` is what the layer asks attention for. `taken` counts its passes.
    """

    def __init__(
        self, parts: LayerParts, buffers: Buffers, compute: ParallelMatmul, seam: Forward, call: AttentionCall
    ) -> None:
        self.parts = parts
        self.buffers = buffers
        self.seam = seam
        self.taken = 0
        self._call = call
        self._compute = compute
        self._source: HeldExperts = parts.source
        self._rotary = 0
        self._most = min(buffers.rows, MOST_ROWS, compute.tiled_rows())
        self._table = steps.experts_table([expert.operands for expert in parts.source.experts])

    def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
        """hidden [1, T, D] -> [1, T, D]."""
        if not self._takes(hidden, named):
            return self.seam(hidden, *args, **named)
        rows, cos, sin = hidden.shape[1], *named["position_embeddings"]
        if self._rotary != cos.shape[-1]:
            self._compose(cos.shape[-1])
        buffers, packed = self.buffers, named["packed"]
        self._first[steps.NORMED] = hidden.data_ptr()
        self._heads[steps.COS], self._heads[steps.SIN] = cos.data_ptr(), sin.data_ptr()
        self._before.run(rows, self._compute.call_on_all)
        qkv = (each[:rows] for each in (buffers.q, buffers.k, buffers.v))
        attended = packed.attention.attend(self._call, *qkv, packed.batch).contiguous()
        out = torch.empty_like(hidden)
        self._projection[0] = attended.data_ptr()
        self._second[steps.NORMED] = hidden.data_ptr()
        self._last[steps.COMBINED] = out.data_ptr()
        self._behind.run(rows, self._compute.call_on_all)
        self._observe(rows)
        self.taken += 1
        return out

    def _takes(self, hidden: Tensor, named: dict[str, Any]) -> bool:
        if not 0 < hidden.shape[1] <= self._most or hidden.shape[0] != 1 or hidden.dtype != torch.bfloat16:
            return False
        cos, sin = named["position_embeddings"]
        same = cos.shape == sin.shape and cos.dtype == sin.dtype == torch.bfloat16 and cos.shape[-1] % 32 == 0
        return (
            same and cos.shape[-1] <= self.parts.head_dim and all(each.is_contiguous() for each in (hidden, cos, sin))
        )

    def _compose(self, rotary: int) -> None:
        """Makes the steps; all addresses but those of a pass's own tensors stay."""
        self._rotary = rotary
        parts, buffers = self.parts, self.buffers
        (first, second), (q_norm, k_norm) = parts.norms, parts.head_norms
        self._first = steps.norm(buffers.total, None, buffers.total, first, buffers.normed)
        outs = (buffers.q, buffers.k, buffers.v)
        products = [
            steps.multiply(buffers.normed, linear.packed, linear.bias, out.flatten(1), scratch)
            for linear, out, scratch in zip(parts.linears[:3], outs, buffers.packed, strict=True)
        ]
        self._heads = steps.heads(HeadRows(buffers.q, q_norm), HeadRows(buffers.k, k_norm), buffers.v, rotary, 1)
        self._before = Steps(
            [
                Step(steps.NORM, self._first),
                *(Step(steps.MULTIPLY, each, waits=False) for each in products[:2]),
                Step(steps.MULTIPLY, products[2]),
                Step(steps.HEADS, self._heads),
            ]
        )
        self._behind = Steps(self._steps_behind(second))

    def _steps_behind(self, second: steps.NormWeight) -> list[Step]:
        parts, buffers, output = self.parts, self.buffers, self.parts.linears[3]
        routed, experts = buffers.routed, parts.source.experts
        attended = buffers.q.flatten(1)
        self._projection = steps.multiply(attended, output.packed, output.bias, buffers.projected, buffers.packed[0])
        self._second = steps.norm(buffers.total, buffers.projected, buffers.total, second, buffers.normed)
        self._last = steps.combine(buffers.outputs, buffers.total, routed)
        return [
            Step(steps.MULTIPLY, self._projection),
            Step(steps.NORM, self._second),
            Step(steps.ROUTER, steps.router(buffers.normed, parts.router, buffers.logits)),
            Step(steps.CHOOSE, steps.choose(buffers.logits, routed.ids, routed.weights, parts.softmax_chosen)),
            *steps.mixture(
                buffers.normed, routed, experts[0].operands, self._table, parts.gate, buffers.outputs, buffers.scratch
            ),
            Step(steps.COMBINE, self._last),
        ]

    def _observe(self, rows: int) -> None:
        """Counts what was routed, as the seam does."""
        routed = self.buffers.routed
        ids, tokens, places = (
            each.view(-1)[: rows * routed.ids.shape[1]] for each in (routed.ids, routed.tokens, routed.places)
        )
        groups = ExpertGroups(ids.view(rows, -1).clone(), routed.counts.tolist(), tokens, places, (0, len(tokens)))
        self._source.stats.observe(self._source.layer, groups)
