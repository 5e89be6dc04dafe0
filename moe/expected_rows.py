"""How many experts and how many padded rows some tokens want together. Torch-free: planning counts with it."""

from __future__ import annotations

from collections.abc import Sequence


def expected_union(tokens: float, per_token: int, num_experts: int, shares: Sequence[float] | None = None) -> float:
    """Experts of a layer that at least one of `tokens` tokens wants, if they choose independently.

    `shares` [num_experts] is how often a token chooses each of them, adding up to `per_token`; alike where it is None.
    Tokens of one text choose alike, so this is an upper bound for them.
    """
    if shares is None:
        shares = [per_token / num_experts] * num_experts
    return sum(wanted_by(tokens, share) for share in shares)


def wanted_by(tokens: float, share: float) -> float:
    """The probability that one of `tokens` tokens chooses an expert that each chooses with probability `share`."""
    missed: float = (1.0 - min(share, 1.0)) ** tokens
    return 1.0 - missed


# Larger groups of rows are padded to a multiple of this. Kernels made for a shape are kept for the next product of that
# shape: with every row count from 1 to 500 they took 200 MiB, with multiples of 16 a tenth, in the same time. Kernels
# for few rows cost by the row, so smaller groups stay as they are.
ROW_MULTIPLE = 16


def padded_rows(count: int) -> int:
    """Rows that an expert computes for `count` tokens."""
    return count if count < ROW_MULTIPLE else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def most_rows(num_tokens: int, per_token: int, num_experts: int) -> int:
    """Rows that all experts of a layer compute together, at most, padding included."""
    assigned = num_tokens * per_token
    return assigned + min(num_experts, assigned) * ROW_MULTIPLE
