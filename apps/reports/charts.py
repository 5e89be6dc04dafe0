"""Charts as inline SVG: lines over time or counts, a bar of parts, a heat map. Colours are classes of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

from ...face import short_duration

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 200, 64, 24, 12
_RIGHT = 8
# Shades of a heat map.
LEVELS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """Points (seconds or count, value) in their order; `style` is a class of the page. A break begins a new stroke.
    `dots` is a class for a dot at each point."""

    points: Sequence[tuple[float, float]]
    style: str = "line"
    steps: bool = False
    dots: str = ""


def over_time(
    label: str,
    lines: Sequence[Line],
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
    label: str, lines: Sequence[Line], number: Callable[[float], str], unit: str, *, log: bool = False
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
