"""The page of `moedge bench`: charts and tables by the number of sequences. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...face import formats_line, gib
from .charts import Line, by_count
from .page import Figure, figures_page

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
        lines.append(Line(known, f"series-{index}{dashed}", dots=f"dots-{index}"))
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


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.3g} s"


def _nbytes(value: float) -> str:
    return f"{value / 1e6:,.3g} MB"


def _share(value: float) -> str:
    return f"{value:.0%}"
