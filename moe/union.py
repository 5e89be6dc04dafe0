"""How many experts some tokens want together. Torch-free."""

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
