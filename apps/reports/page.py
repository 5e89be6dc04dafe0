"""Pages of a report, of a job or of `moedge bench`: one HTML file that loads nothing, neither script nor font nor
picture.

Charts are inline SVG: lines over time or counts, a bar of parts, a heat map; their colours are classes of the page.
Torch-free.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ...face import GIB, duration, escape_controls, formats_line, gib, short_duration
from .job_report import JobReport

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 200, 64, 24, 12
_RIGHT = 8
# Shades of a heat map.
LEVELS = 8


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Points (seconds or count, value) in their order; `style` is a class of the page. A break begins a new stroke.
    `dots` is a class for a dot at each point."""

    points: Sequence[tuple[float, float]]
    style: str = "line"
    steps: bool = False
    dots: str = ""


def over_time(
    label: str,
    lines: Sequence[ChartLine],
    number: Callable[[float], str],
    *,
    breaks: Iterable[float] = (),
    most: float = 0.0,
    unit: float = 1.0,
) -> Markup:
    """Lines over one axis of seconds; the other one reaches at least `most`, is marked at round numbers of `unit`, and
    `number` writes its values. Dotted lines mark the seconds of `breaks`."""
    points = [point for line in lines for point in line.points]
    end, top = max(x for x, _ in points) or 1.0, max(most, *(y for _, y in points)) or 1.0
    ticks = [unit * tick for tick in _ticks(top / unit)]
    top = max(top, ticks[-1])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + width * point[0] / end, _TOP + height * (1 - point[1] / top)

    parts = []
    for tick in ticks:
        y, text = at((0, tick))[1], escape(number(tick))
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{width}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for second in breaks:
        parts.append(f'<path class="break" d="M{at((second, 0))[0]:.1f} {_TOP}v{height}"/>')
    for line in lines:
        parts.append(f'<path class="{line.style}" d="{_path([at(point) for point in line.points], line.steps)}"/>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        x, text = _LEFT + width * share, escape(short_duration(end * share))
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    return _svg(label, _WIDTH, _HEIGHT, parts)


def by_count(
    label: str, lines: Sequence[ChartLine], number: Callable[[float], str], unit: str, *, log: bool = False
) -> Markup:
    """Lines over counts of `unit` on a logarithmic axis. Values are on one from 0 on, and with `log` on one of powers
    of ten, which leaves out points that are not above 0; `number` writes them. Counts are above 0."""
    drawn = [[point for point in line.points if point[1] > 0 or not log] for line in lines]
    points = [point for line in drawn for point in line] or [(1.0, 1.0)]
    counts = sorted({x for x, _ in points})
    ticks = _powers([y for _, y in points]) if log else _ticks(max(y for _, y in points) or 1.0)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    first, last, low, high = (
        log10(counts[0]),
        log10(counts[-1]),
        *(log10(y) if log else y for y in (ticks[0], ticks[-1])),
    )

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (log10(point[0]) - first) / ((last - first) or 1)
        up = ((log10(point[1]) if log else point[1]) - low) / ((high - low) or 1)
        return _LEFT + width * across, _TOP + height * (1 - up)

    parts = []
    for tick in ticks:
        y, text = at((counts[0], tick))[1], escape(number(tick))
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{width}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for line, kept in zip(lines, drawn, strict=True):
        dots = [at(point) for point in kept]
        parts.append(f'<path class="{line.style}" d="{_path(dots, line.steps)}"/>')
        parts += [f'<circle class="{line.dots}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in dots if line.dots]
    return _svg(label, _WIDTH, _HEIGHT, [*parts, *_count_ticks(counts, unit, lambda x: at((x, ticks[-1]))[0])])


def _count_ticks(counts: Sequence[float], unit: str, x_of: Callable[[float], float]) -> Iterable[str]:
    """The counts below the axis, as many as do not touch; the last one names what is counted."""
    edge = float("inf")
    for count in reversed(counts):
        last = count == counts[-1]
        text = f"{count:,.0f} {unit}" if last else f"{count:,.0f}"
        x, width = x_of(count), 6.5 * len(text)
        left = x - width if last else max(x - width / 2, _LEFT - 6)
        if left + width <= edge - 8 or last:
            edge = left
            yield f'<text class="tick" x="{left:.1f}" y="{_HEIGHT - 6}">{escape(text)}</text>'


def _powers(values: Sequence[float]) -> list[float]:
    """Powers of ten around values above 0, or of a hundred or more where there are many."""
    first, last = floor(log10(min(values))), ceil(log10(max(values)))
    step = max(1, ceil((last - first) / 6))
    return [10.0**power for power in range(first, max(last, first + 1) + step, step)]


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    if not points:
        return ""
    if steps:
        return f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _ticks(top: float) -> list[float]:
    """Three to six round values from 0 on."""
    raw = top / 4
    size = 10.0 ** floor(log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * number for number in range(ceil(top / step) + 1)]


def parts_bar(label: str, parts: Mapping[str, float]) -> Markup:
    """One bar whose parts are as long as their values, each in a class of its own."""
    total, x, found = sum(parts.values()), 0.0, []
    for style, value in parts.items():
        width = _WIDTH * value / total if total else 0.0
        # A thin line of the background keeps neighbours apart.
        shown = max(width - 2, 0.5)
        found.append(f'<rect class="{style}" x="{x:.1f}" y="0" width="{shown:.1f}" height="26" rx="2"/>')
        x += width
    return _svg(label, _WIDTH, 26, found)


def heat_map(label: str, rows: Sequence[Sequence[float]]) -> Markup:
    """A cell for each value, a line of cells for each row; a value is as dark as it is large, from 0 to the largest.

    Rows may have different lengths. A path for each of LEVELS shades keeps the page small.
    """
    most, columns = max((max(row, default=0) for row in rows), default=0) or 1, max(map(len, rows), default=1)
    size = max(3.0, min(14.0, (_WIDTH - _LEFT) / columns))
    height = max(size, 6.0)
    shades: dict[int, list[str]] = {}
    for line, row in enumerate(rows):
        for column, value in enumerate(row):
            shade = min(LEVELS - 1, int(LEVELS * value / most))
            begin = f"M{_LEFT + column * size:.4g} {line * height:.4g}"
            shades.setdefault(shade, []).append(f"{begin}h{size - 0.5:.3g}v{height - 0.5:.3g}h{0.5 - size:.3g}z")
    parts = [f'<path class="heat-{shade}" d="{"".join(cells)}"/>' for shade, cells in sorted(shades.items())]
    every = max(1, ceil(len(rows) / 24))
    parts += [
        f'<text class="tick" x="{_LEFT - 6}" y="{(line + 0.5) * height + 4:.1f}" text-anchor="end">{line}</text>'
        for line in range(0, len(rows), max(every, ceil(14 / height)))
    ]
    return _svg(label, round(_LEFT + columns * size), round(len(rows) * height), parts)


def _svg(label: str, width: int, height: int, parts: Iterable[str]) -> Markup:
    body = "".join(parts)
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


# What the summary of a job over documents names at most of the rows without a field.
_MOST_LACKING = 12
# The class of each phase in the page: a phase has its colour, whichever others there are.
PHASES = {name: f"part-{(number - 1) % 7}" for number, name in enumerate(JobReport.PHASES)}
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


# Seconds of work of which a line over time says nothing.
_SHORT = 10.0


def _charts(report: JobReport) -> Iterator[tuple[str, Markup]]:
    """Those that something was recorded for."""
    breaks, rows, rates = report.breaks(), report.rows_over_time(), report.rates()
    memory, budget = report.memory_over_time(), report.ram_budget
    if report.seconds < _SHORT:
        rows, rates, memory = [], [], []
    if len(rows) > 1:
        found = over_time("Rows over time", [ChartLine(rows, steps=True)], _number, breaks=breaks, most=report.num_rows)
        yield "rows", found
    if len(rates) > 1:
        expected = [ChartLine([(begin, rate), (end, rate)], "expected") for begin, end, rate in report.expected_rates()]
        yield "rates", over_time("Tokens per second over time", [*expected, ChartLine(rates)], _number, breaks=breaks)
    if len(memory) > 1:
        lines = [ChartLine(memory)]
        if budget is not None:
            lines.insert(0, ChartLine([(0.0, budget), (memory[-1].seconds, budget)], "expected"))
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
        **found, "totals": totals, "outcomes": sorted(totals.get("outcomes", {}).items()),
        "filled": sorted(filled, key=lambda each: -each[1]),
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


Document = Mapping[str, Any]
# The name of a line or row, and the keys that lead to its value in a point.
Series = Mapping[str, Sequence[str]]

# Behind the name of what was measured: the same as predicted.
_PREDICTED = ", predicted"
_THROUGHPUT = {
    "generated": ("throughput", "generated_tok_s"),
    "generated, predicted": ("predicted", "generated_tok_s"),
    "prompt": ("throughput", "prompt_tok_s"),
    "prompt, predicted": ("predicted", "prompt_tok_s"),
}
_FIRST = {"TTFT p50": ("latency", "ttft_s", "p50"), "TTFT p95": ("latency", "ttft_s", "p95")}
_FOLLOWING = {"TPOT p50": ("latency", "tpot_s", "p50"), "TPOT p95": ("latency", "tpot_s", "p95")}
_BYTES = {"from disk": ("bytes", "disk_per_token"), "over PCIe": ("bytes", "device_per_token")}
_UTILISATION = {
    name: ("utilisation", key) for name, key in (("disk", "disk"), ("PCIe", "link"), ("compute", "compute"))
}


def speed_page(found: Document) -> str:
    """An HTML page of the document of `moedge bench --json`; it loads nothing."""
    return figures_page(f"Speed of {found['model']['name']}", list(_about(found)), list(_figures(found)))


def _about(found: Document) -> Iterator[str]:
    plan, load, formats = found["plan"], found["load"], formats_line(found["plan"])
    hardware = found["machine"]["hardware"] or {}
    gpu = (hardware.get("gpu") or {}).get("name") if plan.get("staging") is not None else None
    names = [str(each) for each in (hardware.get("cpu"), gpu) if each]
    yield f"{', '.join([*names, found['at'][:10]])}. moedge {found['version']}."
    yield (
        f"{formats[0].upper()}{formats[1:]}; random prompts of "
        f"{load['prompt_tokens']:,} tokens, {load['max_tokens']:,} generated for each; at most "
        f"{plan['max_sequences']:,} sequences together, {plan['tokens_per_pass']:,} tokens per pass."
    )
    for name, shown in (("host", "RAM"), ("device", "GPU memory")):
        if (tier := found["memory"].get(name)) and tier["peak"]:
            budget = "" if tier["budget"] is None else f" of {gib(tier['budget'])}"
            yield f"{shown}: peak {gib(tier['peak'])}{budget}."
    if not found["machine"]["measured"]:
        yield "The machine was not measured: no utilisation, and a prediction for a slow one."


def _figures(found: Document) -> Iterator[Figure]:
    points = found["points"]
    waits = {point["predicted"]["bottleneck"] for point in points} - {None, ""}
    caption = "Dashed: predicted." + (f" Predicted bottleneck: {', '.join(sorted(waits))}." if waits else "")
    yield from _figure("Tokens per second", points, _THROUGHPUT, _number, caption)
    yield from _figure("Time to the first token", points, _FIRST, _seconds)
    yield from _figure("Time per token after the first", points, _FOLLOWING, _seconds)
    yield from _figure("Bytes of weights per generated token", points, _BYTES, _nbytes)
    yield from _figure("Utilisation", points, _UTILISATION, _share, "Of the rates that moedge doctor measured.")


def _figure(
    title: str, points: Sequence[Any], series: Series, number: Callable[[float], str], caption: str = ""
) -> Iterator[Figure]:
    """One figure of the series that were measured, none where nothing was."""
    values = {name: [_at(point, keys) for point in points] for name, keys in series.items()}
    values = {name: found for name, found in values.items() if any(found)}
    if not values:
        return
    counts = [point["sequences"] for point in points]
    names = [name for name in values if not name.endswith(_PREDICTED)]
    lines = []
    for name, found in values.items():
        known = [(x, y) for x, y in zip(counts, found, strict=True) if y is not None]
        index = names.index(name.removesuffix(_PREDICTED))
        dashed = "" if name in names else " dashed"
        lines.append(ChartLine(known, f"series-{index}{dashed}", dots=f"dots-{index}"))
    head = ["sequences", *(f"{count:,}" for count in counts)]
    rows = [[name, *("-" if y is None else number(y) for y in found)] for name, found in values.items()]
    # A point alone is no curve: its table says all.
    if len(counts) > 1:
        chart = by_count(title, lines, number, "sequences")
        yield Figure(title, chart, names, caption=caption, head=head, rows=rows)
    else:
        yield Figure(title, caption=caption, head=head, rows=rows)


def _at(point: Any, keys: Sequence[str]) -> float | None:
    for key in keys:
        point = point[key]
    return None if point is None else float(point)


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.3g} s"


def _nbytes(value: float) -> str:
    return f"{value / 1e6:,.3g} MB"


def _share(value: float) -> str:
    return f"{value:.0%}"
