"""How many experts, and how many padded rows, the tokens of a pass want together. Torch-free: the planner uses it."""

from __future__ import annotations

from functools import lru_cache
from math import comb


def expected_union(tokens: float, per_token: int, num_experts: int) -> float:
    """The expected number of experts of a layer that at least one of `tokens` independent tokens wants.

    Every expert is as likely. Tokens of one text choose similar experts, so for them this is an upper bound.
    """
    return num_experts * wanted_by(tokens, per_token / num_experts)


def wanted_by(tokens: float, probability: float) -> float:
    """The probability that one of `tokens` tokens chooses an expert that each chooses with `probability`."""
    missed: float = (1.0 - min(probability, 1.0)) ** tokens
    return 1.0 - missed


# Larger groups of rows are padded to a multiple of this. Kernels made for a shape are kept for the next product of that
# shape: with every row count from 1 to 500 they took 200 MiB, with multiples of 16 a tenth, in the same time. Kernels
# for few rows cost by the row, so smaller groups are not padded.
ROW_MULTIPLE = 16


def padded_rows(count: int) -> int:
    """The number of rows that an expert computes for `count` tokens."""
    return count if count < ROW_MULTIPLE else -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def most_rows(num_tokens: int, per_token: int, num_experts: int) -> int:
    """The largest number of rows that all experts of a layer compute together, padding included."""
    assigned = num_tokens * per_token
    return assigned + min(num_experts, assigned) * ROW_MULTIPLE


@lru_cache(8192)
def wanted_rows(tokens: int, probability: float, experts: int) -> tuple[int, ...]:
    """How many of `tokens` independent tokens want each of so many experts that any of them wants, ascending: quantiles
    of as many as there are experts."""
    missed = (1 - probability) ** tokens
    rows, most, reached = [], 0, 0.0
    for expert in range(experts):
        while most < tokens and reached * experts < (expert + 0.5) * (1 - missed):
            most += 1
            reached += comb(tokens, most) * probability**most * (1 - probability) ** (tokens - most)
        rows.append(max(1, most))
    return tuple(rows)
