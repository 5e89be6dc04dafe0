"""A plan on the terminal: tiers with bars, expected speed, and what would change it. Prints what a document holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .formatting import count, duration, gib, kernel_lines

WIDTH = 40
# One letter of a bar for each kind of bytes, in the order in which a tier lists them.
LETTERS = "=#~%+"
_WAITS = {
    "disk": "reading weights from disk",
    "link": "copying weights to the device",
    "compute": "arithmetic",
}


def print_plan(found: Mapping[str, Any], explain: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in _head(found):
        console.print(line)
    console.print(_tiers(found["tiers"]))
    for line in (*_speed(found), *_curves(found["points"]), *_ways(found)):
        console.print(line)
    if explain:
        for line in _explanation(found):
            console.print(line)


def print_refusal(reason: str, fitting: list[str]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"does not fit: {reason}")
    if fitting:
        console.print(f"nearest that fits: {'; or '.join(fitting)}")


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    model, job, plan = found["model"], found["job"], found["plan"]
    yield f"{model['name']}: {count(model['parameters'])} parameters, {count(model['active_parameters'])} active"
    yield (
        f"{job['sequences']:,} rows of {job['prompt_tokens'] / job['sequences']:,.0f} prompt tokens and at most "
        f"{job['generated_tokens'] / job['sequences']:,.0f} to generate, the longest {job['longest']:,}"
    )
    yield (
        f"weights {plan['quant']}, KV cache {plan['kv']}, arithmetic {plan['dtype']}; "
        f"{plan['max_sequences']:,} sequences together, {plan['tokens_per_pass']:,} tokens a pass"
    )
    yield from kernel_lines(plan["lacks"], plan["notes"])
    if left_out := found["left_out"]:
        yield (
            f"{left_out['rows']:,} rows may need more than the {plan['kv_tokens']:,} tokens that fit: error rows; "
            f"every row takes {left_out['takes']}"
        )
    yield ""


def _tiers(tiers: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "budget", "used", "what is in it"):
        table.add_column(
            name, no_wrap=name != "what is in it", justify="right" if name in ("budget", "used") else "left"
        )
    for tier in tiers:
        parts = {name: nbytes for name, nbytes in tier["parts"].items() if nbytes}
        used = sum(parts.values())
        budget = tier["budget"]
        told = ", ".join(
            f"{letter} {name} {gib(nbytes)}" for letter, (name, nbytes) in zip(LETTERS, parts.items(), strict=False)
        )
        table.add_row(tier["tier"], "-" if budget is None else gib(budget), gib(used), told or "nothing")
        if budget and parts:
            table.add_row("", "", "", Text(f"[{_bar(list(parts.values()), budget)}]"))
    return table


def _bar(parts: list[int], budget: int) -> str:
    """Letters in proportion; every part that is there has one, and what is free is blank."""
    letters = "".join(
        letter * max(1, round(WIDTH * nbytes / budget)) for letter, nbytes in zip(LETTERS, parts, strict=False)
    )
    return letters[:WIDTH].ljust(WIDTH)


def _speed(found: Mapping[str, Any]) -> Iterator[str]:
    told = found["prediction"]
    yield ""
    yield (
        f"{told['generated_tok_s']:,.1f} tok/s generated, {told['prompt_tok_s']:,.1f} of prompts; all of it in "
        f"{duration(told['seconds'])} after loading"
    )
    yield f"passes wait for {_WAITS[told['binds']]}: {_busy(told)}"
    if not found["machine"]["measured"]:
        yield "this machine was never measured: these are the speeds of a slow one; `moedge doctor` measures it"


def _busy(told: Mapping[str, Any]) -> str:
    shares = {name: seconds / told["seconds"] for name, seconds in told["busy_s"].items() if seconds}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def _curves(points: list[Mapping[str, Any]]) -> Iterator[str]:
    best = max((point["generated_tok_s"] or 0 for point in points), default=0) or 1
    for varied, curve in groupby(points, key=lambda point: point["varied"]):
        yield ""
        yield "tok/s by sequences together" if varied == "sequences" else f"tok/s by {varied} memory"
        told = list(curve)
        shown = _until_flat(told)
        for point in shown:
            rate = point["generated_tok_s"]
            value = f"{point['value']:,}" if varied == "sequences" else gib(point["value"])
            if rate is None:
                yield f"{value:>12}  does not fit"
                continue
            more = "  and with more" if point is shown[-1] and len(shown) < len(told) else ""
            yield f"{value:>12}  {rate:>9,.1f}  {'#' * max(1, round(WIDTH * rate / best))}{more}"


def _until_flat(curve: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the points at its end that say the same as the one before them."""
    count = len(curve)
    while count > 1 and curve[count - 1]["generated_tok_s"] == curve[count - 2]["generated_tok_s"]:
        count -= 1
    return curve[:count]


def _ways(found: Mapping[str, Any]) -> Iterator[str]:
    ways = found["ways_up"]
    yield ""
    if not ways:
        yield "nothing that was tried makes it faster by a twentieth"
    for way in ways:
        yield f"{way['change']:>16}  {way['generated_tok_s']:,.1f} tok/s, {way['gain']:.2f} times as fast"


def _explanation(found: Mapping[str, Any]) -> Iterator[str]:
    plan, told = found["plan"], found["prediction"]
    yield ""
    yield "weight formats, from exact to lossy, each with the best passes that fit:"
    for name, seconds in found["formats"].items():
        taken = " <- taken" if name == plan["quant"] else ""
        yield f"{name:>12}  {duration(seconds)}, {seconds / told['seconds']:.2f} times this plan's time{taken}"
    yield (
        "auto takes the checkpoint's own precision where all of it fits, else the least lossy format that takes "
        "at most 1.5 times as long as the fastest"
    )
    held = plan["held_nbytes"] / plan["weights_nbytes"]
    yield f"{held:.0%} of the weights are held where they compute; {gib(told['disk_nbytes'])} are read from disk in all"
    yield f"{told['passes']:,.0f} passes with {told['sequences']:,.0f} sequences, at the rates that docs/plan.md lists"
