"""Every kernel against its definition, in published sizes: what tests run, and what has to find planted bugs.

A comparison is a strategy of cases and a function that says how far a case is from right, 1 being the most that
roundings may make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from ..seeded_bugs import Bug, planted
from . import compared_layers, compared_planes, compared_products, compared_triton

# What a run must find a planted bug in.
MOST_EXAMPLES = 40


class Comparison(NamedTuple):
    """`distance` of a case that `cases` draws: at most 1 where the kernel is right, NaN never."""

    cases: SearchStrategy[Any]
    distance: Callable[[Any], float]


COMPARISONS: Mapping[str, Comparison] = MappingProxyType(
    {
        "products in tiles": Comparison(compared_products.cases(True), compared_products.compare),
        "other products": Comparison(compared_products.cases(False), compared_products.compare),
        "experts": Comparison(compared_layers.expert_cases(), compared_layers.compare_experts),
        "mixtures": Comparison(compared_layers.mixture_cases(), compared_layers.compare_mixtures),
        "norms": Comparison(compared_layers.norm_cases(), compared_layers.compare_norms),
        "gates": Comparison(compared_layers.gating_cases(), compared_layers.compare_gates),
        "routers": Comparison(compared_layers.router_cases(), compared_layers.compare_routers),
        "heads": Comparison(compared_layers.head_cases(), compared_layers.compare_heads),
        "attention": Comparison(compared_layers.attention_cases(), compared_layers.compare_attention),
        "packing": Comparison(compared_planes.packing_cases(), compared_planes.compare_packing),
        "widening": Comparison(compared_planes.widening_cases(), compared_planes.compare_widening),
        "key transforms": Comparison(compared_planes.key_cases(), compared_planes.compare_keys),
        "grouped products": Comparison(compared_triton.grouped_cases(), compared_triton.compare_grouped),
        "paged attention": Comparison(compared_triton.paged_cases(), compared_triton.compare_paged),
        "stored keys": Comparison(compared_triton.stored_cases(), compared_triton.compare_stored),
    }
)


class Wrong(AssertionError):
    """A case was too far from its definition."""


def run(name: str, examples: int, first_seed: int = 0, each: Callable[[Any, float], None] | None = None) -> None:
    """Draws that many cases of a comparison. Raises Wrong at the first that is wrong, and what a kernel raises."""
    comparison = COMPARISONS[name]

    @seed(first_seed)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    @given(comparison.cases)
    def compare(case: Any) -> None:
        distance = comparison.distance(case)
        if each is not None:
            each(case, distance)
        if math.isnan(distance) or distance > 1:
            raise Wrong(f"{name}: {case} is {distance:.3g} times as far from its definition as roundings may make it")

    compare()


def examples_until_found(bug: Bug, first_seed: int = 0) -> int | None:
    """How many cases its comparison needs to find a planted bug; None if MOST_EXAMPLES do not."""
    seen: list[float] = []
    with planted(bug):
        try:
            run(bug.found_by, MOST_EXAMPLES, first_seed, lambda _, distance: seen.append(distance))
        except Wrong:
            return len(seen)
    return None
