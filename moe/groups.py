"""The tokens of a pass grouped by expert. T tokens, A experts per token, E experts, S = T * A assignments."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Assignments sorted by expert: expert e owns rows offsets[e] to offsets[e + 1] of the sorted order.

    `order` [S] holds the place t * A + a of each sorted row; `token_ids` [S] its token t.
    """

    order: torch.Tensor
    token_ids: torch.Tensor
    offsets: tuple[int, ...]

    @property
    def wanted(self) -> list[int]:
        """The experts that some token asked for, ascending."""
        return [e for e in range(len(self.offsets) - 1) if self.offsets[e] < self.offsets[e + 1]]

    def rows(self, expert_id: int) -> slice:
        return slice(self.offsets[expert_id], self.offsets[expert_id + 1])


def group_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertGroups:
    """One stable sort and one copy of E counts to the host; expert_ids [T, A]."""
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = (0, *torch.cumsum(counts, 0).tolist())
    return ExpertGroups(order, order // expert_ids.shape[1], offsets)


def combine(rows: torch.Tensor, groups: ExpertGroups, weights: torch.Tensor) -> torch.Tensor:
    """Each token's experts, weighted and summed: rows [S, D] in sorted order, weights [T, A] -> [T, D].

    The sum runs over a token's experts in the router's order, so it does not depend on the order in which experts
    were computed; there is nothing to add atomically.
    """
    num_tokens, experts_per_token = weights.shape
    by_token = torch.empty_like(rows)
    by_token[groups.order] = rows
    weighted = by_token.view(num_tokens, experts_per_token, -1) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(rows.dtype)
