"""A layer's experts that are all held on a device, which groups a pass's tokens itself: the host waits for nothing.
Imports Triton.
"""

from __future__ import annotations

from typing import Self

import torch

from ..quant.kernels.operands import Gate, ProductOperands, Stack
from ..quant.kernels.product import GroupedProduct
from ..quant.matmul.matmul import ParallelMatmul
from .expert import ExpertBody, HeldExperts, combine
from .grouping_kernel import Grouped


class RoutedExperts:
    """Computes the routed sum of one layer in four launches: grouping, two products, and the sum."""

    @classmethod
    def of(cls, held: HeldExperts, body: ExpertBody, product: GroupedProduct) -> Self | None:
        """None where no kernel supports such experts."""
        ups, downs = [each.up.layout for each in held.experts], [each.down.layout for each in held.experts]
        if body.gate is None or not product.takes(*ups) or not product.takes(*downs):
            return None
        return cls(held, body, body.gate)

    def __init__(self, held: HeldExperts, body: ExpertBody, gate: Gate) -> None:
        self._held, self._body, self._gate = held, body, gate
        experts = held.experts
        self._first = experts[0]
        ups = ProductOperands([each.up for each in experts], [each.up_bias for each in experts])
        downs = ProductOperands([each.down for each in experts], [each.down_bias for each in experts])
        # Addresses of what is held never change.
        stacks, _ = Stack.all_of([*ups.runs, *downs.runs])
        self._up, self._down = ups.packed(stacks[: len(ups.runs)]), downs.packed(stacks[len(ups.runs) :])
        device = self._first.up.planes[0].device
        # A tensor that is allocated in inference mode could not be cleared outside of it.
        with torch.inference_mode(False):
            self._totals = torch.zeros(2, len(experts) + 1, dtype=torch.int64, device=device)
        held.stats.count_later(held.layer, self._totals)

    def mix(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, compute: ParallelMatmul
    ) -> torch.Tensor:
        """hidden [T, D], expert_ids and weights [T, A] -> [T, D]."""
        product = compute.grouped
        assert product is not None
        height = product.height(expert_ids.numel() / len(self._held.experts), hidden.dtype)
        grouped = Grouped.of(expert_ids, self._totals, height)
        inner = hidden.new_empty(expert_ids.numel(), self._first.up.shape[0] // 2)
        rows = compute.workspace.rows(expert_ids.numel(), hidden)
        self._launch(product, hidden, inner, grouped, gated=True)
        self._launch(product, inner, rows, grouped, gated=False)
        if self._body.norm is not None:
            rows.copy_(self._body.norm(rows))
        return combine(rows, grouped.rows, weights)

    def _launch(
        self, product: GroupedProduct, x: torch.Tensor, out: torch.Tensor, grouped: Grouped, *, gated: bool
    ) -> None:
        if gated:
            matrix, bias, packed = self._first.up, self._first.up_bias, self._up
        else:
            matrix, bias, packed = self._first.down, self._first.down_bias, self._down
        token_ids, gate = (grouped.token_ids, self._gate) if gated else (None, None)
        product.launch(x, out, [matrix], [bias], grouped.tiles, token_ids, gate, packed).run()
