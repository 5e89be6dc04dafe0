"""What an expert computes, the tokens of a pass grouped by expert, and the routed sum of their outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch.nn.functional import embedding_bag

from ..quant.kernels.operands import Gate
from ..quant.kernels.upload import upload
from ..quant.matmul.matmul import Matmul, ParallelMatmul
from ..quant.matmul.tiled import ExpertRows
from ..quant.scratch import whole_vectors
from ..quant.tensor import PackedTensor
from .expected_rows import padded_rows
from .routing_stats import RoutingStats


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Assignments sorted by expert: expert e owns rows offsets[e] to offsets[e + 1]; the last of them are padding.

    `token_ids` [P] is the token of each row; padding rows repeat token 0. `assignment_rows` [S] is the row of
    assignment t * A + a. `expert_ids` [T, A] is what the router chose, `counts` [E] the number of tokens that chose
    each expert.
    """

    expert_ids: torch.Tensor
    counts: list[int]
    token_ids: torch.Tensor
    assignment_rows: torch.Tensor
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    @property
    def wanted(self) -> list[int]:
        """The experts that at least one token chose, in ascending order."""
        return [expert for expert, count in enumerate(self.counts) if count]

    def rows(self, expert_id: int) -> slice:
        return slice(self.offsets[expert_id], self.offsets[expert_id + 1])


# The number of assignments up to which Python groups them on a CPU before torch has called half of its operations.
FEW_ASSIGNMENTS = 64


def group_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertGroups:
    """Groups expert_ids [T, A] with one stable sort. On a device the host waits once, for E counts.

    The host derives everything else from the counts. `bincount` would make it wait a second time, for the largest id.
    """
    if expert_ids.is_cpu and expert_ids.numel() <= FEW_ASSIGNMENTS:
        return _group_few(expert_ids, num_experts)
    flat = expert_ids.reshape(-1)
    ascending, order = torch.sort(flat, stable=True)
    counts: list[int] = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat)).tolist()
    offsets = tuple(accumulate(map(padded_rows, counts), initial=0))
    # The number of padding rows before each expert's first row.
    moved = [begin - first for begin, first in zip(offsets, accumulate(counts, initial=0), strict=True)]
    shifts = upload(torch.tensor(moved), flat.device)
    rows = shifts[ascending].add_(torch.arange(len(flat), device=flat.device))
    token_ids = flat.new_zeros(offsets[-1]).scatter_(0, rows, order // expert_ids.shape[1])
    assignment_rows = torch.empty_like(order).scatter_(0, order, rows)
    return ExpertGroups(expert_ids, counts, token_ids, assignment_rows, offsets)


def _group_few(expert_ids: torch.Tensor, num_experts: int) -> ExpertGroups:
    """As `group_by_expert`, by a counting sort of lists."""
    chosen: list[int] = expert_ids.reshape(-1).tolist()
    counts = [0] * num_experts
    for expert in chosen:
        counts[expert] += 1
    offsets = tuple(accumulate(map(padded_rows, counts), initial=0))
    following, token_ids, rows = list(offsets), [0] * offsets[-1], []
    for assignment, expert in enumerate(chosen):
        row = following[expert]
        following[expert] = row + 1
        rows.append(row)
        token_ids[row] = assignment // expert_ids.shape[1]
    ids, assignment_rows = (torch.tensor(each, dtype=expert_ids.dtype) for each in (token_ids, rows))
    return ExpertGroups(expert_ids, counts, ids, assignment_rows, offsets)


def combine(rows: torch.Tensor, groups: ExpertGroups, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts: rows [P, D] sorted by expert, weights [T, A] -> [T, D].

    The sum is float32 and takes a token's experts in the router's order, so it does not depend on the order in which
    experts were computed, and needs no atomic additions. One kernel gathers, weighs and sums: separate kernels would
    write every row two more times, which took ten to forty times as long.
    """
    rows_of = groups.assignment_rows.view(weights.shape)
    return embedding_bag(rows_of, rows, per_sample_weights=weights.to(rows.dtype), mode="sum")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's packed weights: up ([gate;] up, fused where the family has both) [N, D] and down [D, I]."""

    up: PackedTensor
    down: PackedTensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def operands(self) -> tuple[PackedTensor, torch.Tensor | None, PackedTensor, torch.Tensor | None]:
        """Both matrices, each with its bias."""
        return self.up, self.up_bias, self.down, self.down_bias


class OneShotEvent:
    """An event that is set at most once and that one thread at a time may wait for.

    A `threading.Event` takes several times as long, and a pass needs thousands.
    """

    __slots__ = ("_lock", "has_happened")

    def __init__(self) -> None:
        self.has_happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Sets the event; it has no effect when the event is set already."""
        self.has_happened = True
        with suppress(RuntimeError):
            # Raised when the event was set before.
            self._lock.release()

    def wait(self) -> None:
        """Returns when the event is set."""
        if not self.has_happened:
            self._lock.acquire()


@dataclass(frozen=True, slots=True)
class ResidentExpert:
    """An expert whose weights compute can read now.

    `computed` is set when its weights may be overwritten; it is None for a held expert.
    """

    expert_id: int
    weights: ExpertWeights
    computed: OneShotEvent | None = None

    def finish(self) -> None:
        """The expert was computed, or computing it has failed."""
        if self.computed is not None:
            self.computed.set()


@dataclass(frozen=True, slots=True)
class ExpertBody:
    """The parts of a family's experts that are not matrices: the activation, gate included, and an optional last norm.

    `gate` names what `activate` computes where a kernel supports it; such experts are computed together.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    gate: Gate | None = None

    def forward(self, rows: torch.Tensor, weights: ExpertWeights, compute: Matmul) -> None:
        """Overwrites rows [n, D], an expert's inputs, with its outputs."""
        inner = self.activated(rows, weights, compute)
        compute.linear(inner, weights.down, weights.down_bias, out=rows)
        if self.norm is not None:
            rows.copy_(self.norm(rows))

    def activated(self, rows: torch.Tensor, weights: ExpertWeights, compute: Matmul) -> torch.Tensor:
        """The inputs of the second matrix. In deterministic mode rows are padded for the activation, because its
        vector loop and its remainder may round differently (scratch.VECTOR_ROWS)."""
        if not compute.deterministic or rows.device.type != "cpu":
            return self.activate(compute.linear(rows, weights.up, weights.up_bias))
        inner = rows.new_empty(whole_vectors(len(rows)), weights.up.shape[0])
        inner[len(rows) :].zero_()
        compute.linear(rows, weights.up, weights.up_bias, out=inner[: len(rows)])
        return self.activate(inner)[: len(rows)]

    def forward_by_kernel(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        groups: ExpertGroups,
        residents: list[ResidentExpert],
        compute: Matmul,
    ) -> bool:
        """Computes the rows [P, D] of experts from hidden [T, D] by one kernel of the CPU.

        Returns False, having done nothing, where none supports them or where other products are faster.
        """
        if self.gate is None:
            return False
        wanted = [
            ExpertRows(groups.offsets[one.expert_id], groups.counts[one.expert_id], *one.weights.operands)
            for one in residents
        ]
        if not compute.experts(hidden, groups.token_ids, wanted, self.gate, rows):
            return False
        if self.norm is not None:
            for one in residents:
                span = groups.rows(one.expert_id)
                rows[span] = self.norm(rows[span])
        return True

    def forward_together(
        self,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        groups: ExpertGroups,
        residents: list[ResidentExpert],
        compute: ParallelMatmul,
    ) -> bool:
        """Computes the rows [P, D] of several experts from hidden [T, D] in two kernel launches.

        Returns False, having done nothing, where no kernel supports them.
        """
        if compute.grouped is None or self.gate is None or not residents:
            return False
        product, weights = compute.grouped, [one.weights for one in residents]
        ups, downs = [expert.up for expert in weights], [expert.down for expert in weights]
        if not product.takes(ups) or not product.takes(downs):
            return False
        spans = [groups.rows(one.expert_id) for one in residents]
        cut = product.rows(spans, hidden)
        # The rows of other experts stay uninitialized; nothing reads them.
        inner = hidden.new_empty(groups.num_rows, ups[0].shape[0] // 2)
        up_biases, down_biases = [expert.up_bias for expert in weights], [expert.down_bias for expert in weights]
        product.launch(hidden, inner, ups, up_biases, cut, groups.token_ids, self.gate).run()
        product.launch(inner, rows, downs, down_biases, cut).run()
        if self.norm is not None:
            for span in spans:
                rows[span] = self.norm(rows[span])
        return True


class ExpertSource(Protocol):
    """Provides a layer's experts during passes."""

    @property
    def num_experts(self) -> int: ...

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        """Yields the experts that `groups` want as they become usable, first all that are held.

        `hidden` [T, D] are the states of the tokens. The caller may ask for the next list while it still computes
        earlier ones, the first excepted; their weights stay until they are finished.
        """


def mix_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertSource,
    body: ExpertBody,
    compute: ParallelMatmul,
) -> torch.Tensor:
    """Computes the routed sum of experts: hidden [T, D], expert_ids and weights [T, A] -> [T, D]."""
    groups = group_by_expert(expert_ids, experts.num_experts)
    rows = compute.workspace.rows(groups.num_rows, hidden)

    def run_expert(expert: ResidentExpert, products: Matmul) -> None:
        mine = groups.rows(expert.expert_id)
        try:
            if body.forward_by_kernel(hidden, rows, groups, [expert], products):
                return
            # The thread that computes gathers its rows itself, so that they are in its cache.
            torch.index_select(hidden, 0, groups.token_ids[mine], out=rows[mine])
            body.forward(rows[mine], expert.weights, products)
        finally:
            expert.finish()

    def ungrouped(residents: list[ResidentExpert]) -> list[ResidentExpert]:
        """The experts that remain to be computed one by one, largest groups first so that threads finish together."""
        if not body.forward_together(hidden, rows, groups, residents, compute):
            return sorted(residents, key=lambda one: -groups.counts[one.expert_id])
        for one in residents:
            one.finish()
        return []

    fetched = experts.fetch(groups, hidden)
    remaining = ungrouped(next(fetched, []))
    if body.forward_by_kernel(hidden, rows, groups, remaining, compute):
        for one in remaining:
            one.finish()
    else:
        compute.parallel_for(remaining, run_expert)
    # A thread that is free takes the next expert that arrives; it does not wait for the others.
    compute.parallel_for(chain.from_iterable(map(ungrouped, fetched)), run_expert)
    return combine(rows, groups, weights)


@dataclass(slots=True)
class HeldExperts:
    """The source of a layer whose model holds all experts; `fetch` yields the wanted ones in one list."""

    layer: int
    experts: list[ExpertWeights]
    stats: RoutingStats

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        self.stats.count(self.layer, len(groups.expert_ids), groups.counts)
        yield [ResidentExpert(expert_id, self.experts[expert_id]) for expert_id in groups.wanted]
