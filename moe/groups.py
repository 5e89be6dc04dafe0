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
