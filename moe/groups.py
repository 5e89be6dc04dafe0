"""The tokens of a pass grouped by expert. T tokens, A experts per token, E experts, S = T * A assignments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import embedding_bag

from ..quant.kernels.upload import upload
from .expected_rows import padded_rows


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Assignments laid out by expert: expert e owns rows offsets[e] to offsets[e + 1], the last ones padding.

    `token_ids` [P] holds each row's token, padding rows repeat token 0; `places` [S] the row of assignment t * A + a.
    `expert_ids` [T, A] is what the router chose, `counts` [E] how many tokens chose each expert.
    """

    expert_ids: torch.Tensor
    counts: list[int]
    token_ids: torch.Tensor
    places: torch.Tensor
    offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    @property
    def wanted(self) -> list[int]:
        """The experts that some token asked for, ascending."""
        return [expert for expert, count in enumerate(self.counts) if count]

    def rows(self, expert_id: int) -> slice:
        return slice(self.offsets[expert_id], self.offsets[expert_id + 1])


def group_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertGroups:
    """One stable sort; expert_ids [T, A]. On a device the host waits once: for E counts.

    Everything else that it has to know follows from them (`bincount`, too, would wait, to learn the largest id).
    """
    flat = expert_ids.reshape(-1)
    ascending, order = torch.sort(flat, stable=True)
    counts: list[int] = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat)).tolist()
    offsets = tuple(accumulate(map(padded_rows, counts), initial=0))
    # How far padding has moved each expert's first row.
    moved = [begin - first for begin, first in zip(offsets, accumulate(counts, initial=0), strict=True)]
    shifts = upload(torch.tensor(moved), flat.device)
    rows = shifts[ascending].add_(torch.arange(len(flat), device=flat.device))
    token_ids = flat.new_zeros(offsets[-1]).scatter_(0, rows, order // expert_ids.shape[1])
    places = torch.empty_like(order).scatter_(0, order, rows)
    return ExpertGroups(expert_ids, counts, token_ids, places, offsets)


def combine(rows: torch.Tensor, groups: ExpertGroups, weights: torch.Tensor) -> torch.Tensor:
    """Each token's experts, weighted and summed: rows [P, D] by expert, weights [T, A] -> [T, D].

    The sum runs over a token's experts in the router's order, in float32, so it does not depend on the order in which
    experts were computed; there is nothing to add atomically. One kernel gathers, weighs and sums: apart, they would
    write every row twice more, which took ten to forty times as long.
    """
    return embedding_bag(groups.places.view(weights.shape), rows, per_sample_weights=weights.to(rows.dtype), mode="sum")
