"""What one expert computes, and where its matrices come from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from ..quant.kernels.operands import Gate
from ..quant.matmul.matmul import Matmul
from ..quant.matmul.parallel import ParallelMatmul
from ..quant.scratch import whole_vectors
from ..quant.tensor import PackedTensor
from .affinity import Affinity
from .groups import ExpertGroups, combine, group_by_expert
from .popularity import Popularity


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's matrices: up ([gate;] up, fused where the family has both) [N, D] and down [D, I]."""

    up: PackedTensor
    down: PackedTensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class Once:
    """Something that happens and stays so, seen by other threads.

    A `threading.Event` takes several times as long, thousands of times a pass.
    """

    __slots__ = ("_has_happened", "_lock")

    def __init__(self) -> None:
        self._has_happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """It has happened; to say so again changes nothing."""
        self._has_happened = True
        with suppress(RuntimeError):
            # Raised where somebody has said so before.
            self._lock.release()

    def is_set(self) -> bool:
        return self._has_happened

    def wait(self) -> None:
        """Returns when it has happened. For one waiting thread at a time."""
        if not self._has_happened:
            self._lock.acquire()


@dataclass(frozen=True, slots=True)
class Arrived:
    """An expert that can be computed. `computed` is set when its weights may go; None where they stay."""

    expert_id: int
    weights: ExpertWeights
    computed: Once | None = None

    def finish(self) -> None:
        """Whoever computes the expert has done so, or has failed."""
        if self.computed is not None:
            self.computed.set()


@dataclass(frozen=True, slots=True)
class ExpertBody:
    """What a family's experts do around their two matrices: activation (gate included) and an optional last norm.

    `gate` is what `activate` does, where a kernel knows it: experts are then computed together.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    gate: Gate | None = None

    def forward(self, rows: torch.Tensor, weights: ExpertWeights, compute: Matmul) -> None:
        """Replaces rows [n, D], an expert's inputs, by its outputs."""
        inner = self.activated(rows, weights, compute)
        compute.linear(inner, weights.down, weights.down_bias, out=rows)
        if self.norm is not None:
            rows.copy_(self.norm(rows))

    def activated(self, rows: torch.Tensor, weights: ExpertWeights, compute: Matmul) -> torch.Tensor:
        """What the second matrix multiplies; deterministic rows are padded meanwhile (scratch.VECTOR_ROWS)."""
        if not compute.deterministic or rows.device.type != "cpu":
            return self.activate(compute.linear(rows, weights.up, weights.up_bias))
        inner = rows.new_empty(whole_vectors(len(rows)), weights.up.shape[0])
        inner[len(rows) :].zero_()
        compute.linear(rows, weights.up, weights.up_bias, out=inner[: len(rows)])
        return self.activate(inner)[: len(rows)]

    def forward_together(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        groups: ExpertGroups,
        arrived: list[Arrived],
        compute: ParallelMatmul,
    ) -> bool:
        """Fills the rows [P, D] of experts that arrived together from hidden [T, D], in two launches.

        False, and nothing done, where there is no kernel for them.
        """
        if compute.grouped is None or self.gate is None or not arrived:
            return False
        product, weights = compute.grouped, [one.weights for one in arrived]
        ups, downs = [expert.up for expert in weights], [expert.down for expert in weights]
        if not product.takes(ups) or not product.takes(downs):
            return False
        spans = [groups.rows(one.expert_id) for one in arrived]
        cut = product.rows(spans, hidden)
        # What other experts' rows hold does not matter.
        inner = hidden.new_empty(groups.num_rows, ups[0].shape[0] // 2)
        up_biases, down_biases = [expert.up_bias for expert in weights], [expert.down_bias for expert in weights]
        product.launch(hidden, inner, ups, up_biases, cut, groups.token_ids, self.gate).run()
        product.launch(inner, rows, downs, down_biases, cut).run()
        if self.norm is not None:
            for span in spans:
                rows[span] = self.norm(rows[span])
        return True


class ExpertSource(Protocol):
    """Where a layer's experts come from."""

    @property
    def num_experts(self) -> int: ...

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        """Of what the router made `groups` of, for tokens with the states `hidden` [T, D].

        Yields the wanted experts as they become usable, those that did so together: first all that are there already.
        When the next are asked for, others may still be computed; until they are finished their weights stay.
        """
        ...


def mix_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertSource,
    body: ExpertBody,
    compute: ParallelMatmul,
) -> torch.Tensor:
    """The routed sum of experts: hidden [T, D], expert_ids and weights [T, A] -> [T, D]."""
    groups = group_by_expert(expert_ids, experts.num_experts)
    rows = compute.workspace.rows(groups.num_rows, hidden)

    def run_expert(arrived: Arrived, products: Matmul) -> None:
        mine = groups.rows(arrived.expert_id)
        try:
            # Gathered here, not before: the thread that computes on them next has them in its cache.
            torch.index_select(hidden, 0, groups.token_ids[mine], out=rows[mine])
            body.forward(rows[mine], arrived.weights, products)
        finally:
            arrived.finish()

    def left_alone(arrived: list[Arrived]) -> list[Arrived]:
        """Those that were not computed together here; largest groups first, so that no thread ends with one."""
        if not body.forward_together(hidden, rows, groups, arrived, compute):
            return sorted(arrived, key=lambda one: -groups.counts[one.expert_id])
        for one in arrived:
            one.finish()
        return []

    fetched = experts.fetch(groups, hidden)
    compute.parallel_for(left_alone(next(fetched, [])), run_expert)
    # Whichever thread is free takes the next that arrives: nobody waits for the others of a group.
    compute.parallel_for(chain.from_iterable(map(left_alone, fetched)), run_expert)
    return combine(rows, groups, weights)


@dataclass(slots=True)
class HeldExperts:
    """All experts of a layer, usable where they lie; `fetch` yields the wanted ones at once."""

    layer: int
    experts: list[ExpertWeights]
    popularity: Popularity
    affinity: Affinity

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        self.popularity.saw(self.layer, len(groups.expert_ids), groups.counts)
        self.affinity.saw(self.layer, groups.expert_ids)
        yield [Arrived(expert_id, self.experts[expert_id]) for expert_id in groups.wanted]
