"""Charts as inline SVG: lines over time, a bar of parts, a heat map. Colours are classes that the page defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

from ..settings.formatting import short_duration

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 200, 64, 24, 12
_RIGHT = 8
# Shades of a heat map.
LEVELS = 8


@dataclass(frozen=True, slots=True)
class Line:
    """Points (seconds, value) in their order; `style` is a class of the page. A break begins a new stroke."""

    points: Sequence[tuple[float, float]]
    style: str = "line"
    steps: bool = False


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
