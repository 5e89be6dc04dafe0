"""The table of `moedge bench`: a column for each number of sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ...offload.budget import gib
from ...runtime.settings.formatting import fit, formats_line

Point = Mapping[str, Any]


def print_bench(found: Mapping[str, Any]) -> None:
    """Prints the document of `moedge bench --json` for people."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if sys.stdout.isatty() else None
    for line in _head(found):
        console.print(fit(line, width))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("sequences", no_wrap=True)
    for point in found["points"]:
        table.add_column(f"{point['sequences']:,}", justify="right", no_wrap=True)
    for name, cell in _ROWS:
        cells = [cell(point) for point in found["points"]]
        if any(cells):
            table.add_row(name, *(each or "-" for each in cells))
    console.print(table)
    for line in _foot(found):
        console.print(fit(line, width))


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    plan, load = found["plan"], found["load"]
    yield f"{found['model']['name']}: {formats_line(plan)}"
    yield (
        f"random prompts of {load['prompt_tokens']:,} tokens, {load['max_tokens']:,} generated for each; at most "
        f"{plan['max_sequences']:,} sequences together, {plan['tokens_per_pass']:,} tokens per pass"
    )


def _foot(found: Mapping[str, Any]) -> Iterator[str]:
    for name, shown in (("host", "RAM"), ("device", "GPU memory")):
        if (tier := found["memory"].get(name)) and tier["peak"]:
            budget = "" if tier["budget"] is None else f" of {gib(tier['budget'])}"
            yield f"{shown}: peak {gib(tier['peak'])}{budget}"
    measured = {point["sequences"] for point in found["points"]}
    if left_out := [count for count in found["load"]["sequences"] if count not in measured]:
        counts = ", ".join(f"{count:,}" for count in left_out)
        yield f"not measured: {counts} sequences do not fit together; give more memory"
    if not found["machine"]["measured"]:
        yield "machine not measured: no utilisation, and a prediction for a slow one; run `moedge doctor`"


def _seconds(*keys: str) -> Callable[[Point], str]:
    def shown(point: Point) -> str:
        value = _at(point, keys)
        return "" if value is None else f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"

    return shown


def _rate(*keys: str) -> Callable[[Point], str]:
    def shown(point: Point) -> str:
        value = _at(point, keys)
        return "" if value is None else f"{value:,.1f}"

    return shown


def _bytes(*keys: str) -> Callable[[Point], str]:
    def shown(point: Point) -> str:
        value = _at(point, keys)
        return f"{value / 1e6:,.1f} MB" if value else ""

    return shown


def _share(*keys: str) -> Callable[[Point], str]:
    def shown(point: Point) -> str:
        value = _at(point, keys)
        return "" if value is None else f"{value:.0%}"

    return shown


def _bottleneck(point: Point) -> str:
    return str(point["predicted"]["bottleneck"] or "")


def _at(point: Point, keys: tuple[str, ...]) -> Any:
    value: Any = point
    for key in keys:
        value = value[key]
    return value


_ROWS: tuple[tuple[str, Callable[[Point], str]], ...] = (
    ("TTFT p50", _seconds("latency", "ttft_s", "p50")),
    ("TTFT p95", _seconds("latency", "ttft_s", "p95")),
    ("TPOT p50", _seconds("latency", "tpot_s", "p50")),
    ("TPOT p95", _seconds("latency", "tpot_s", "p95")),
    ("prompt tok/s", _rate("throughput", "prompt_tok_s")),
    ("  predicted", _rate("predicted", "prompt_tok_s")),
    ("generated tok/s", _rate("throughput", "generated_tok_s")),
    ("  predicted", _rate("predicted", "generated_tok_s")),
    ("disk per token", _bytes("bytes", "disk_per_token")),
    ("  utilisation", _share("utilisation", "disk")),
    ("PCIe per token", _bytes("bytes", "device_per_token")),
    ("  utilisation", _share("utilisation", "link")),
    ("compute utilisation", _share("utilisation", "compute")),
    ("bottleneck, predicted", _bottleneck),
)
