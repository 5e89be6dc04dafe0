"""Formats, arithmetics, caches, attention and instruction sets on real weights: a pairwise cover."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from support.real import cases
from support.real.cases import Case
from support.real.measure import Found
from support.real.text import FRANCE, same_answers

pytestmark = pytest.mark.real
# How many of 40 answers may begin otherwise than the definition's, beside those that bf16 itself changes.
SPARE = {"native": 2, "int8": 6, "int8/int4": 14, "int4": 20}

# Every format in bf16, and two in float32.
QUICK = [*cases.weights_and_compute(), *(case for case in cases.exact() if case.quant in ("none", "int4"))]
EVERY = [pytest.param(case, id=case.title, marks=() if case in QUICK else pytest.mark.slow) for case in cases.cover()]
Definitions = Callable[[str, str, str, str], Found]


def result(found: Mapping[Case, Found | str], case: Case) -> Found:
    what = found[case]
    assert isinstance(what, Found), what
    return what


def test_every_pair_of_values_is_in_a_case() -> None:
    factors = cases.here()
    wanted = {pair for case in cases.product(factors) for pair in cases.pairs(case)}
    chosen = cases.cover()
    assert wanted == {pair for case in chosen for pair in cases.pairs(case)}
    assert wanted > {(("quant", quant), ("isa", isa)) for quant in factors["quant"] for isa in factors["isa"]}
    assert len(chosen) < len(cases.product(factors)) / 4


@pytest.mark.parametrize("case", EVERY)
def test_prose_is_as_likely_as_the_definition_has_it(
    case: Case, found: Mapping[Case, Found | str], defined: Definitions
) -> None:
    ours = result(found, case)
    wanted = defined(case.quant, case.compute, case.dtype, "fp32").part(ours)
    assert ours.perplexity == pytest.approx(wanted.perplexity, rel=cases.MOST[case.kv])


@pytest.mark.parametrize("case", EVERY)
def test_answers_begin_as_the_definitions_do(
    case: Case, found: Mapping[Case, Found | str], defined: Definitions
) -> None:
    """At least as often as the definition in bf16 does, less a few; in float32 without int8 arithmetic always."""
    ours = result(found, case)
    wanted = defined(case.quant, case.compute, case.dtype, "fp32").part(ours)
    same = same_answers(ours.answers, wanted.answers)
    if case.dtype == "fp32" and case.kv == "native" and case.compute == "float":
        assert same == len(ours.answers)
        return
    in_bf16 = defined(case.quant, case.compute, "bf16", "bf16").part(ours)
    reached = same_answers(in_bf16.answers, defined(case.quant, case.compute, "bf16", "fp32").part(ours).answers)
    assert same >= reached - SPARE[case.kv]


@pytest.mark.parametrize(
    "case", [case for case in cases.weights_and_compute() if case.quant in ("none", "int8", "int4")]
)
def test_formats_lose_no_more_than_a_hundredth(
    case: Case, found: Mapping[Case, Found | str], defined: Definitions
) -> None:
    """Of these weights, which lie on a 4-bit grid that int4 nearly has: the original file is Q4_1."""
    exact = defined("none", "float", "fp32", "fp32")
    assert result(found, case).perplexity == pytest.approx(exact.perplexity, rel=0.01)
    if case.compute == "float":
        # Of rounded activations not even the definition says so: this model is about to answer in French.
        assert "Paris" in result(found, case).texts[FRANCE]
