"""The real model, fetched where it is missing, what moedge makes of it in the cases that were selected, and what it
ought to make. `make real` runs these tests, and no other target does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.real.cases import Case
from support.real.definition import Stock
from support.real.measure import Found, measure
from support.real.rotation import rotated, shallow
from support.real.smollm2 import smollm2
from support.real.tables import Definitions
from support.real.text import FEW

# 1,532 predicted tokens: enough for one part in a hundred of the same tokens, and two seconds a case.
NUM_WINDOWS = 4
# Triton's interpreter gets two layers of the original.
MODELS: Mapping[str, Callable[[], Path]] = {"original": smollm2, "rotated": rotated, "shallow": shallow}
DefinitionsOf = Callable[[str], Definitions]


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
def defined(reference: Stock) -> DefinitionsOf:
    """By model; in bf16 answers alone."""

    @functools.cache
    def of(name: str) -> Definitions:
        stock = reference if name == "original" else Stock(MODELS[name]())

        @functools.cache
        def make(quant: str, compute: str, packed_from: str, dtype: str) -> Found:
            num_windows = NUM_WINDOWS if dtype == "fp32" else 0
            return stock.define(quant, compute, packed_from, dtype).ask(num_windows, FEW)

        return make

    return of


@pytest.fixture(scope="session")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, Case], Found | str]:
    """What every selected case gave of its model: a process for each model and instruction set, two at a time, since
    loading, and Triton's interpreter, use one core."""
    params = [each.params for item in request.session.items if (each := getattr(item, "callspec", None))]
    asked = dict.fromkeys((each["name"], each["case"]) for each in params if "case" in each)
    models = {name: MODELS[name]() for name in dict.fromkeys(name for name, _ in asked)}
    together: dict[tuple[str, str], list[Case]] = {}
    for name, case in asked:
        together.setdefault((name, case.isa), []).append(case)

    def run(key: tuple[str, str]) -> dict[tuple[str, Case], Found | str]:
        name, _ = key
        measured = measure(models[name], together[key], tmp_path_factory.mktemp(name), NUM_WINDOWS, FEW)
        return {(name, case): each for case, each in measured.items()}

    with ThreadPoolExecutor(2) as processes:
        return {key: each for part in processes.map(run, together) for key, each in part.items()}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the tables that tests made, in whichever process."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, table in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{table}")
