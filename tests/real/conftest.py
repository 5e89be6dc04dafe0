"""The real model, fetched where it is missing, what moedge makes of it in the cases that were selected, and what it
ought to make. `make real` runs these tests, and no other target does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from support.real import cases
from support.real.cases import Case
from support.real.definition import Stock
from support.real.measure import Found, measure
from support.real.recorded import NUM_WINDOWS, num_windows, recorded
from support.real.rotation import rotated, shallow
from support.real.smollm2 import smollm2
from support.real.tables import Definitions
from support.real.text import FEW

# Triton's interpreter gets two layers of the original.
MODELS: Mapping[str, Callable[[], Path]] = {"original": smollm2, "rotated": rotated, "shallow": shallow}
DefinitionsOf = Callable[[str], Definitions]
FoundOf = Callable[[str, Case], Found]


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
def defined(request: pytest.FixtureRequest) -> DefinitionsOf:
    """By model: as recorded, or else computed; in bf16 answers alone."""

    @functools.cache
    def stock(name: str) -> Stock:
        made: Stock = request.getfixturevalue("reference") if name == "original" else Stock(MODELS[name]())
        return made

    @functools.cache
    def make(name: str, *key: str) -> Found:
        return recorded(name).get(key) or stock(name).define(*key).ask(num_windows(key), FEW)

    return lambda name: functools.partial(make, name)


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest) -> Iterator[FoundOf]:
    """What a case gave of a model, once it is there: at the first question all selected cases of that model begin, a
    process for each instruction set."""
    params = [each.params for item in request.session.items if (each := getattr(item, "callspec", None))]
    asked = dict.fromkeys((each["name"], each["case"]) for each in params if "case" in each)
    results: dict[tuple[str, Case], Future[Found | str]] = {}
    # Those that are in no table.
    brief = set(cases.cover()).difference(cases.weights_and_compute())

    def run(name: str, some: list[Case]) -> None:
        try:
            for case, each in measure(MODELS[name](), some, NUM_WINDOWS, FEW, brief):
                results[name, case].set_result(each)
        except BaseException as error:
            for case in some:
                if not results[name, case].done():
                    results[name, case].set_exception(error)

    with ThreadPoolExecutor(2) as processes:

        def of(name: str, case: Case) -> Found:
            if (name, case) not in results:
                by_isa: dict[str, list[Case]] = {}
                for each in (each for model, each in asked if model == name):
                    by_isa.setdefault(each.isa, []).append(each)
                    results[name, each] = Future()
                for some in by_isa.values():
                    processes.submit(run, name, some)
            what = results[name, case].result()
            assert isinstance(what, Found), what
            return what

        yield of


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the tables that tests made, in whichever process."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, table in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{table}")
