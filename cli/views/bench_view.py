"""What `moedge bench` and `moedge check` print. The table of bench has a column for each number of sequences."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from rich.console import Console
from rich.table import Table

from ...formatting import fit, formats_line, loss_line
from ...offload.budget import gib
from ...runtime.evaluation.check import CheckReport

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
    for name, keys, show in _ROWS:
        cells = [_cell(point, keys, show) for point in found["points"]]
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


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes else ""


def _cell(point: Point, keys: tuple[str, ...], show: Callable[[Any], str]) -> str:
    value = reduce(getitem, keys, point)
    return "" if value is None else show(value)


# Names, the keys that lead to a value in a point, and how it is written.
_ROWS: tuple[tuple[str, tuple[str, ...], Callable[[Any], str]], ...] = (
    ("TTFT p50", ("latency", "ttft_s", "p50"), _seconds),
    ("TTFT p95", ("latency", "ttft_s", "p95"), _seconds),
    ("TPOT p50", ("latency", "tpot_s", "p50"), _seconds),
    ("TPOT p95", ("latency", "tpot_s", "p95"), _seconds),
    ("prompt tok/s", ("throughput", "prompt_tok_s"), "{:,.1f}".format),
    ("  predicted", ("predicted", "prompt_tok_s"), "{:,.1f}".format),
    ("generated tok/s", ("throughput", "generated_tok_s"), "{:,.1f}".format),
    ("  predicted", ("predicted", "generated_tok_s"), "{:,.1f}".format),
    ("disk per token", ("bytes", "disk_per_token"), _megabytes),
    ("  utilisation", ("utilisation", "disk"), "{:.0%}".format),
    ("PCIe per token", ("bytes", "device_per_token"), _megabytes),
    ("  utilisation", ("utilisation", "link"), "{:.0%}".format),
    ("compute utilisation", ("utilisation", "compute"), "{:.0%}".format),
    ("bottleneck, predicted", ("predicted", "bottleneck"), str),
)


def print_check(found: CheckReport) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if sys.stdout.isatty() else None
    for line in lines(found):
        console.print(fit(line, width))


def lines(found: CheckReport) -> Iterator[str]:
    """The report, for people."""
    how = f"weights {found.quant}, compute {found.compute}, keys and values {found.kv}, dtype {found.dtype}"
    yield f"{found.model}: {how}; {found.prompts} prompts, {found.tokens:,} tokens"
    how = "transformers' own loading" if found.reference == "transformers" else "transformers' code, a layer at a time"
    yield f"against {how}, in float32" + (f": {found.why}" if found.why else "")
    yield f"logits   greatest difference {found.max_abs:.1e}, relative {found.max_relative:.1e}"
    yield f"         greatest KL divergence {found.kl:.1e} nats"
    yield f"tokens   {found.greedy_same} of {found.greedy_total} greedy ones are the same"
    yield f"layers   greatest relative difference {_greatest(found.layers)}"
    yield f"alone    from the same input {_greatest(found.local)}; output head {found.head:.1e}"
    if any(found.rerouted):
        yield f"         other experts for at most {max(found.rerouted):.1%} of a layer's tokens"
    worst = max(found.parts, key=lambda part: part.error / part.bound)
    yield f"parts    products and attention differ by at most {worst.error / worst.bound:.2f} of their bounds"
    if line := loss_line(found.loss):
        yield line
    yield verdict(found)


def verdict(found: CheckReport) -> str:
    """One sentence: whether the numbers agree, and if not, where they part."""
    if not found.within:
        return f"Differs: {found.difference}."
    rounding = f"the rounding of {found.dtype}" + (" and of activations in int8" if found.compute == "int8" else "")
    return f"Same: from the same input, all layers and the output head differ by {rounding} only."


def _greatest(errors: Sequence[float]) -> str:
    greatest = max(range(len(errors)), key=lambda index: errors[index])
    return f"{errors[greatest]:.1e}, after layer {greatest}"
