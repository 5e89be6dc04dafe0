"""The real model, fetched where it is missing, what moedge makes of it in the cases that were selected, and what it
ought to make. `make real` runs these tests, and no other target does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from support.real.cases import Case
from support.real.definition import Stock
from support.real.measure import Found, measure
from support.real.rotation import rotated
from support.real.smollm2 import smollm2
from support.real.text import QUESTIONS

# 766 predicted tokens: enough for one part in a hundred of the same tokens, and two seconds a case.
NUM_WINDOWS = 4
Definitions = Callable[[str, str, str, str], Found]


@pytest.fixture(scope="session")
def model() -> Path:
    return smollm2()


@pytest.fixture(scope="session")
def off_grid() -> Path:
    return rotated()


@pytest.fixture(scope="session")
def reference(model: Path) -> Stock:
    return Stock(model)


@pytest.fixture(scope="session")
def defined(reference: Stock) -> Definitions:
    """`defined(quant, compute, packed_from, dtype)` is what transformers finds with the weights that a format means."""

    @functools.cache
    def make(quant: str, compute: str, packed_from: str, dtype: str) -> Found:
        return reference.define(quant, compute, packed_from, dtype).ask(NUM_WINDOWS, len(QUESTIONS))

    return make


@pytest.fixture(scope="session")
def found(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Case, Found | str]:
    """What every selected case gave: one process an instruction set runs all of its cases."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    cases = dict.fromkeys(each.params["case"] for each in params if each is not None and "case" in each.params)
    return measure(model, cases, tmp_path_factory.mktemp("cases"), NUM_WINDOWS)
