"""A layer's experts that are all in a device's memory when it computes them: it groups a pass's tokens itself, and the
host waits for nothing. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch

from ..quant.kernels.operands import STEP_NBYTES, Gate, Packed, ProductOperands, Stack
from ..quant.kernels.product import GroupedProduct
from ..quant.kernels.upload import upload
from ..quant.matmul.matmul import ParallelMatmul
from .expert import ExpertBody, ExpertWeights, HeldExperts, combine
from .expert_cache import StreamedExperts
from .grouping_kernel import Grouped


class RoutedExperts:
    """Computes the routed sum of a layer's held experts in four launches: grouping, two products, and the sum."""

    @classmethod
    def of(cls, held: HeldExperts, body: ExpertBody, product: GroupedProduct) -> Self | None:
        """None where no kernel supports such experts."""
        ups, downs = [each.up.layout for each in held.experts], [each.down.layout for each in held.experts]
        if body.gate is None or not product.takes(*ups) or not product.takes(*downs):
            return None
        return cls(held, body, body.gate)

    def __init__(self, held: HeldExperts, body: ExpertBody, gate: Gate) -> None:
        experts = held.experts
        self._routes = _Routes(body, gate, len(experts), experts[0].up.planes[0].device)
        self._first = experts[0]
        ups = ProductOperands([each.up for each in experts], [each.up_bias for each in experts])
        downs = ProductOperands([each.down for each in experts], [each.down_bias for each in experts])
        # Addresses of what is held never change.
        stacks, _ = Stack.all_of([*ups.runs, *downs.runs])
        self._up, self._down = ups.packed(stacks[: len(ups.runs)]), downs.packed(stacks[len(ups.runs) :])
        held.stats.count_later(held.layer, self._routes.totals)

    def mix(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, compute: ParallelMatmul
    ) -> torch.Tensor:
        """hidden [T, D], expert_ids and weights [T, A] -> [T, D]."""
        return self._routes.mix(hidden, expert_ids, weights, compute, (self._first, self._up, self._down))


class RoutedStream:
    """As `RoutedExperts`, in passes that read all of a layer's experts: their addresses go up with every pass."""

    @classmethod
    def of(cls, source: StreamedExperts, body: ExpertBody, product: GroupedProduct) -> Self | None:
        """None where no kernel supports such experts."""
        if body.gate is None or not all(product.takes(layout) for layout in source.layouts):
            return None
        return cls(source, body, body.gate, product.device)

    def __init__(self, source: StreamedExperts, body: ExpertBody, gate: Gate, device: torch.device) -> None:
        self._source = source
        self._routes = _Routes(body, gate, source.num_experts, device)
        self._biases: tuple[Stack | None, Stack | None] | None = None

    def mix(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, compute: ParallelMatmul
    ) -> torch.Tensor | None:
        """hidden [T, D], expert_ids and weights [T, A] -> [T, D]; None, with nothing done, in passes of which the host
        must know what they want."""
        if not self._source.reads_all:
            return None
        experts = self._source.read_all(len(hidden), self._routes.totals)
        try:
            return self._routes.mix(hidden, expert_ids, weights, compute, self._place(experts))
        finally:
            self._source.computed_all()

    def _place(self, experts: Sequence[ExpertWeights]) -> tuple[ExpertWeights, Packed, Packed]:
        """Each plane of an expert lies as far behind the begin of its shard as those of all others: one list of shifts
        is that of all planes."""
        first = experts[0]
        begins = np.fromiter((each.up.planes[0].data_ptr() for each in experts), np.int64, len(experts))
        shifts, rest = np.divmod(begins - begins[0], STEP_NBYTES)
        assert not rest.any(), "shards begin at multiples of SHARD_ALIGNMENT"
        there = upload(torch.from_numpy(shifts), first.up.planes[0].device)
        if self._biases is None:
            up, down = ([each.up_bias for each in experts], [each.down_bias for each in experts])
            self._biases = _stacked(up), _stacked(down)
        sides = (
            Packed(**{plane.name: Stack(of, there) for plane, of in zip(side.layout.planes, side.planes, strict=True)})
            for side in (first.up, first.down)
        )
        up_side, down_side = (side._replace(biases=bias) for side, bias in zip(sides, self._biases, strict=True))
        return first, up_side, down_side


class _Routes:
    """What both have."""

    def __init__(self, body: ExpertBody, gate: Gate, num_experts: int, device: torch.device) -> None:
        self._body, self._gate, self._num_experts, self._device = body, gate, num_experts, device

    @cached_property
    def totals(self) -> torch.Tensor:
        """int64 [2, E + 1]: the tokens that chose each expert (`Grouped.of`)."""
        # A tensor that is allocated in inference mode could not be cleared outside of it.
        with torch.inference_mode(False):
            return torch.zeros(2, self._num_experts + 1, dtype=torch.int64, device=self._device)

    def mix(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        compute: ParallelMatmul,
        experts: tuple[ExpertWeights, Packed, Packed],
    ) -> torch.Tensor:
        """`experts` are any one of them, and where the matrices of all are."""
        product, (first, up, down) = compute.grouped, experts
        assert product is not None
        height = product.height(expert_ids.numel() / self._num_experts, hidden.dtype)
        grouped = Grouped.of(expert_ids, self.totals, height)
        inner = hidden.new_empty(expert_ids.numel(), first.up.shape[0] // 2)
        rows = compute.workspace.rows(expert_ids.numel(), hidden)
        tiles = grouped.tiles
        product.launch(hidden, inner, [first.up], [first.up_bias], tiles, grouped.token_ids, self._gate, up).run()
        product.launch(inner, rows, [first.down], [first.down_bias], tiles, packed=down).run()
        if self._body.norm is not None:
            rows.copy_(self._body.norm(rows))
        return combine(rows, grouped.rows, weights)


def _stacked(biases: Sequence[torch.Tensor | None]) -> Stack | None:
    given = [bias for bias in biases if bias is not None]
    return Stack.all_of([given])[0][0] if given else None
