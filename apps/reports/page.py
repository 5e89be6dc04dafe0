"""Pages of a report: one HTML file that loads nothing, neither script nor font nor picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ...face import GIB, duration, escape_controls, gib
from .charts import LEVELS, Line, heat_map, over_time, parts_bar
from .job_report import JobReport

# What the summary of a job over documents names at most of the rows without a field.
_MOST_LACKING = 12
# The class of each phase in the page: a phase has its colour, whichever others there are.
PHASES = {name: f"part-{number}" for number, name in enumerate(JobReport.PHASES)}
# The colours of the lines of one chart, by their order: those of phases, the strongest first.
SERIES = (1, 2, 3, 4, 0, 5)


def page(report: JobReport) -> str:
    """All text of the job is escaped, whatever its rows hold."""
    charts = dict.fromkeys(("rows", "rates", "memory", "phases", "experts"), Markup("")) | dict(_charts(report))
    return _rendered(
        "page", report=report, charts=charts, phases=report.phases(), styles=PHASES,
        documents=_documents(report.documents),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with the names of its lines in their order, and a table: its first column is text, the others numbers."""

    title: str
    chart: Markup = field(default_factory=Markup)
    names: Sequence[str] = ()
    caption: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def figures_page(title: str, about: Sequence[str], figures: Sequence[Figure]) -> str:
    """A page of charts in the style of a job's report; `about` are the lines below its title. All text is escaped."""
    return _rendered("figures", title=title, about=about, figures=figures)


def _rendered(name: str, **values: Any) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_text)
    )
    environment.filters |= {"number": _number, "duration": duration, "gib": gib, "shown": _shown}
    template = environment.get_template(f"{name}.html.jinja")
    return template.render(**values, levels=LEVELS, series=SERIES, version=version("moedge"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


def _charts(report: JobReport) -> Iterator[tuple[str, Markup]]:
    """Those that something was recorded for."""
    breaks, rows, rates = report.breaks(), report.rows_over_time(), report.rates()
    if len(rows) > 1:
        found = over_time("Rows over time", [Line(rows, steps=True)], _number, breaks=breaks, most=report.num_rows)
        yield "rows", found
    if len(rates) > 1:
        expected = [Line([(begin, rate), (end, rate)], "expected") for begin, end, rate in report.expected_rates()]
        yield "rates", over_time("Tokens per second over time", [*expected, Line(rates)], _number, breaks=breaks)
    memory, budget = report.memory_over_time(), report.ram_budget
    if len(memory) > 1:
        lines = [Line(memory)]
        if budget is not None:
            lines.insert(0, Line([(0.0, budget), (memory[-1].seconds, budget)], "expected"))
        yield "memory", over_time("Memory over time", lines, gib, breaks=breaks, unit=GIB)
    if phases := report.phases():
        yield "phases", parts_bar("Seconds by phase", {PHASES[name]: seconds for name, seconds in phases.items()})
    if experts := report.expert_use():
        shares = [[count / (sum(layer) or 1) for count in layer] for layer in experts]
        yield "experts", heat_map("Use of experts, a line for each layer", shares)


def _documents(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the summary of a job over documents that the page shows; empty for other jobs."""
    if not summary:
        return {}
    totals, found = summary["totals"], summary["report"]
    filled = [(name, count / totals["structured"]) for name, count in totals["filled"].items() if totals["structured"]]
    return {
        **found, "totals": totals, "filled": sorted(filled, key=lambda each: -each[1]),
        "lacking": {name: _some(rows) for name, rows in totals.get("lacking", {}).items()},
    }  # fmt: skip


def _some(rows: Sequence[str]) -> str:
    """The rows that are known, which are the first ones."""
    return ", ".join(map(_shown, rows)) + ("..." if len(rows) == _MOST_LACKING else "")


def _number(value: float) -> str:
    """`1,234`, `0.25`."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _shown(value: Any) -> str:
    """A setting or a message, without characters that reorder or hide what is read."""
    return escape_controls(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
