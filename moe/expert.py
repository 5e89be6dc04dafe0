"""What an expert computes, the tokens of a pass grouped by expert, and the routed sum of their outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from ..quant.kernels.operands import Gate, ProductOperands
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

    `token_ids` [P] is the token of each row; padding rows repeat token 0; `host_token_ids` are the same in host memory.
    `assignment_rows` [S] is the row of assignment t * A + a. `expert_ids` [T, A] is what the router chose, `counts` [E]
    the number of tokens that chose each expert. `foreseen` came to the host with the ids (`ExpertSource.foresee`).
    """

    expert_ids: torch.Tensor
    counts: list[int]
    token_ids: torch.Tensor
    host_token_ids: torch.Tensor
    assignment_rows: torch.Tensor
    offsets: tuple[int, ...]
    foreseen: tuple[torch.Tensor, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    @property
    def wanted(self) -> list[int]:
        """The experts that at least one token chose, in ascending order."""
        return [expert for expert, count in enumerate(self.counts) if count]

    def rows(self, expert_id: int) -> slice:
        return slice(self.offsets[expert_id], self.offsets[expert_id + 1])


def group_by_expert(
    expert_ids: torch.Tensor, num_experts: int, foreseen: tuple[torch.Tensor, ...] = ()
) -> ExpertGroups:
    """Groups expert_ids [T, A] with one stable sort, by numpy: torch's operations are a dozen, each a kernel of a
    device, and take longer on any processor. A device is waited for once, for the ids and for `foreseen`, two tensors
    of one size or none, and gets all back in one copy.
    """
    chosen = expert_ids.reshape(-1)
    # Beside scores, ids become float32, which has all of them.
    host = torch.cat((chosen, *map(torch.flatten, foreseen))).cpu() if foreseen else chosen.cpu()
    ids = host[: len(chosen)].numpy().astype(np.int64, copy=False)
    counts = np.bincount(ids, minlength=num_experts)
    # Of 16 bits: a radix sort.
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    offsets = tuple(accumulate(map(padded_rows, counts.tolist()), initial=0))
    # The number of padding rows before each expert's first row.
    moved = np.array(offsets[:-1]) - (np.cumsum(counts) - counts)
    rows = np.arange(len(ids)) + np.repeat(moved, counts)
    both = np.zeros(offsets[-1] + len(ids), np.int64)
    both[rows] = order // expert_ids.shape[1]
    both[offsets[-1] + order] = rows
    here = torch.from_numpy(both)
    there = upload(here, expert_ids.device)
    came = host[len(chosen) :].chunk(2) if foreseen else ()
    by_row, by_choice = there[: offsets[-1]], there[offsets[-1] :]
    return ExpertGroups(expert_ids, counts.tolist(), by_row, here[: offsets[-1]], by_choice, offsets, came)


def combine(rows: torch.Tensor, assignment_rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts: rows [P, D] sorted by expert, weights [T, A] -> [T, D].

    `assignment_rows` [S] is the row of assignment t * A + a.

    The sum is float32 and takes a token's experts in the router's order, so it does not depend on the order in which
    experts were computed, and needs no atomic additions. One kernel gathers, weighs and sums: separate kernels would
    write every row two more times, which took ten to forty times as long.
    """
    rows_of = assignment_rows.view(weights.shape)
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
        if not all(product.takes(*(each.layout for each in side)) for side in (ups, downs)):
            return False
        spans = [groups.rows(one.expert_id) for one in residents]
        up_biases, down_biases = [expert.up_bias for expert in weights], [expert.down_bias for expert in weights]
        cut, (up, down) = product.upload(
            spans, hidden, ProductOperands(ups, up_biases), ProductOperands(downs, down_biases)
        )
        # The rows of other experts stay uninitialized; nothing reads them.
        inner = hidden.new_empty(groups.num_rows, ups[0].shape[0] // 2)
        product.launch(hidden, inner, ups, up_biases, cut, groups.token_ids, self.gate, up).run()
        product.launch(inner, rows, downs, down_biases, cut, packed=down).run()
        if self.norm is not None:
            for span in spans:
                rows[span] = self.norm(rows[span])
        return True


class ExpertSource(Protocol):
    """Provides a layer's experts during passes."""

    @property
    def num_experts(self) -> int: ...

    def foresee(self, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        """Experts that the next layer may want, and their scores, both [T, A], on the device of `hidden` [T, D], where
        a token chooses `per_token`; nothing where nobody asks. Called before the layer's own choices are waited for."""

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        """Yields the experts that `groups` want as they become usable, first all that are held where none arrives.

        `hidden` [T, D] are the states of the tokens. Of experts that are not yielded the source has computed the rows
        [P, D] of `groups` itself when the iterator ends. The caller may ask for the next list while it still computes
        earlier ones; their weights stay until they are finished, those of held ones until the iterator ends.
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
    # What lies in host memory is not waited for: it can be foreseen behind the requests for what is missing.
    foreseen = () if hidden.device.type == "cpu" else experts.foresee(hidden, expert_ids.shape[1])
    groups = group_by_expert(expert_ids, experts.num_experts, foreseen)
    rows = compute_experts(hidden, groups, experts, body, compute)
    return combine(rows, groups.assignment_rows, weights)


def compute_experts(
    hidden: torch.Tensor, groups: ExpertGroups, experts: ExpertSource, body: ExpertBody, compute: ParallelMatmul
) -> torch.Tensor:
    """The outputs of experts for hidden [T, D]: [P, D], in the rows of the groups; the next call overwrites them."""
    rows = compute.workspace.rows(groups.num_rows, hidden)

    def run(some: list[ResidentExpert], products: Matmul) -> None:
        try:
            if body.forward_by_kernel(hidden, rows, groups, some, products):
                return
            for one in some:
                mine = groups.rows(one.expert_id)
                # The thread that computes gathers its rows itself, so that they are in its cache.
                torch.index_select(hidden, 0, groups.token_ids[mine], out=rows[mine])
                body.forward(rows[mine], one.weights, products)
        finally:
            for one in some:
                one.finish()

    def ungrouped(residents: list[ResidentExpert]) -> list[ResidentExpert]:
        """The experts that remain for single threads, largest groups first so that they finish together."""
        if not body.forward_together(hidden, rows, groups, residents, compute):
            return sorted(residents, key=lambda one: -groups.counts[one.expert_id])
        for one in residents:
            one.finish()
        return []

    def parts(residents: list[ResidentExpert]) -> list[list[ResidentExpert]]:
        """What one thread computes at a time: an expert that arrived, or held ones as they come."""
        remaining = ungrouped(residents)
        arrived = any(one.computed is not None for one in remaining)
        return [[one] for one in remaining] if arrived else [remaining]

    fetched = experts.fetch(groups, hidden, rows)
    first = ungrouped(next(fetched, []))
    if first and not body.forward_by_kernel(hidden, rows, groups, first, compute):
        compute.parallel_for([[one] for one in first], run)
    # A thread that is free takes what comes next; it does not wait for the others.
    compute.parallel_for(filter(None, chain.from_iterable(map(parts, fetched))), run)
    return rows


@dataclass(slots=True)
class HeldExperts:
    """The source of a layer whose model holds all experts; `fetch` yields the wanted ones in one list."""

    layer: int
    experts: list[ExpertWeights]
    stats: RoutingStats

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def foresee(self, hidden: torch.Tensor, per_token: int) -> tuple[torch.Tensor, ...]:
        return ()

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        self.stats.count(self.layer, len(groups.expert_ids), groups.counts)
        yield [ResidentExpert(expert_id, self.experts[expert_id]) for expert_id in groups.wanted]
