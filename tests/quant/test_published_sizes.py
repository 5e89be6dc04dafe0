"""Kernels (`quant/native/`, `quant/kernels/`) in the sizes of published models agree with their definitions; the matrix
has all sizes.
"""

import re
from pathlib import Path

import pytest
import torch

from moedge.quant.formats.format import FORMATS, QUANT_FORMATS
from moedge.quant.matmul import tiled
from moedge.quant.native import library
from support.kernels import comparisons
from support.kernels.compared_products import Case, compare, multiple_of, usable, ways_of
from support.published_widths import FIRST_WIDTHS, PUBLISHED
from support.seeded_bugs import BUGS, Bug

pytestmark = pytest.mark.numerics

needs_library = pytest.mark.skipif(not tiled.has_kernel(), reason="the library of CPU kernels is not usable here")
OF_TORCH = {"other products", "key transforms", "grouped products", "paged attention", "stored keys"}
# The examples of the fast lane; Triton's interpreter takes seconds for one.
EXAMPLES = {"other products": 4, "mixtures": 2, "grouped products": 1, "paged attention": 1, "stored keys": 1}
TRITON = {"grouped products", "paged attention", "stored keys"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_there_is_a_model_of_every_family_that_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tables" / "models.md").read_text()
    tables = page.partition("## Refused")[0]
    assert {each.family for each in PUBLISHED} == set(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE))


@pytest.mark.parametrize("name", comparisons.COMPARISONS)
def test_kernels_agree_with_their_definitions(name: str) -> None:
    if name not in OF_TORCH and not tiled.has_kernel():
        pytest.skip(library.lack())
    comparisons.run(name, EXAMPLES.get(name, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", comparisons.COMPARISONS)
def test_many_cases_agree_with_their_definitions(name: str) -> None:
    if name not in OF_TORCH and not tiled.has_kernel():
        pytest.skip(library.lack())
    comparisons.run(name, 10 if name in TRITON else 200, first_seed=1)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_is_right_in_the_widths_that_are_odd(name: str) -> None:
    """SmolLM2's, gpt-oss', GLM-4.5-Air's, Gemma 4's and others, in every way in which they are multiplied here."""
    formats = [True, False] if name in QUANT_FORMATS else [True]
    for library_ in formats:
        ways = ways_of(name, library_)
        for index, width in enumerate(FIRST_WIDTHS):
            if width % multiple_of(name, library_):
                continue
            case = Case(name, usable(ways, (64, width)), (64, width), (1, 13, 30)[index % 3], index % 2 == 0)
            assert compare(case) <= 1, case


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("bug", BUGS.values(), ids=list(BUGS))
def test_planted_bugs_are_found(bug: Bug) -> None:
    if not bug.is_here:
        pytest.skip(f"code for {bug.least_isa} alone")
    assert comparisons.examples_until_found(bug) is not None
