"""A plan as a person sees it on the terminal: what the JSON document holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .formatting import count, duration, gib, kernel_lines

WIDTH = 30
# The letter of a bar for each arena; the same in every tier.
LETTERS = {
    "process": "-",
    "context and libraries": "-",
    "small parameters": ":",
    "scratch of products": ".",
    "activations": "@",
    "slack of allocators": "+",
    "loading": "!",
    "KV cache": "#",
    "parked blocks": "^",
    "weights held": "=",
    "weights staged for the device": "=",
    "rings of streamed weights": "~",
    "store of weights": "=",
}
# Arenas as --explain subtracts them, before what is left for weights that stay.
_WEIGHTS = ("weights held", "weights staged for the device")
_NAMES = {"host": "RAM", "device": "GPU memory", "disk": "disk"}
_LEAST_SHOWN = 1 << 20


def print_plan(found: Mapping[str, Any], explain: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for line in _head(found):
        console.print(line)
    console.print(_tiers(found["tiers"]))
    for line in (*_legend(found["tiers"]), *_speed(found), *_curves(found["points"]), *_suggestions(found)):
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
    yield (
        f"{model['name']}: {model['type']}, {count(model['parameters'])} parameters "
        f"({count(model['active_parameters'])} active), {_layers(model)}"
    )
    if download := found["download"]:
        yield f"not here: a job downloads {gib(download['nbytes'])} first; {gib(download['free'])} free for it"
    yield f"computing on {found['machine']['computes']}"
    if preset := found["machine"]["preset"]:
        yield f"preset {preset}: figures of its data sheet, not measured"
    yield (
        f"{job['sequences']:,} rows of {job['prompt_tokens'] / job['sequences']:,.0f} prompt tokens and at most "
        f"{job['generated_tokens'] / job['sequences']:,.0f} to generate, the longest {job['longest']:,}"
    )
    yield (
        f"plan: weights {plan['quant']}, KV cache {plan['kv']}, dtype {plan['dtype']}; "
        f"{plan['max_sequences']:,} sequences, {plan['tokens_per_pass']:,} tokens per pass; {_held(found)}"
    )
    yield from kernel_lines(plan["lacks"], plan["notes"])
    if left_out := found["left_out"]:
        yield (
            f"{left_out['rows']:,} rows may need more than the {plan['kv_tokens']:,} tokens that fit: error rows; "
            f"every row takes {left_out['takes']}"
        )
    yield ""


def _layers(model: Mapping[str, Any]) -> str:
    if not model["experts"]:
        return f"{model['layers']} layers"
    each, used = model["experts_per_layer"], model["experts_per_token"]
    return f"{model['layers']} layers x {each} experts, {used} per token"


def _held(found: Mapping[str, Any]) -> str:
    """What stays where it computes."""
    plan, experts = found["plan"], found["model"]["experts"]
    if not experts:
        return f"holds {plan['held_nbytes'] / plan['weights_nbytes']:.0%} of the weights"
    return f"holds {sum(plan['placement']['held_experts']):,} of {experts:,} experts"


def _tiers(tiers: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "budget", "used", "free", ""):
        table.add_column(name, no_wrap=True, justify="right" if name else "left")
    for tier in tiers:
        parts = {name: nbytes for name, nbytes in tier["parts"].items() if nbytes}
        used, budget = sum(parts.values()), tier["budget"]
        free = "-" if budget is None else gib(max(0, budget - used))
        bar = Text(f"[{_bar(parts, budget)}]") if budget and parts else ""
        table.add_row(_NAMES[tier["tier"]], "-" if budget is None else gib(budget), gib(used), free, bar)
    return table


def _bar(parts: Mapping[str, int], budget: int) -> str:
    """Letters in proportion; every part that is there has one, and what is free is blank."""
    letters = "".join(LETTERS[name] * max(1, round(WIDTH * nbytes / budget)) for name, nbytes in parts.items())
    return letters[:WIDTH].ljust(WIDTH)


def _legend(tiers: list[Mapping[str, Any]]) -> Iterator[str]:
    """One line a tier; what takes less than a MiB is in the sums only."""
    for tier in tiers:
        shown = [(name, nbytes) for name, nbytes in tier["parts"].items() if nbytes >= _LEAST_SHOWN]
        if shown:
            parts = ", ".join(f"{LETTERS[name]} {name} {gib(nbytes)}" for name, nbytes in shown)
            yield f"{_NAMES[tier['tier']]}: {parts}"


def _speed(found: Mapping[str, Any]) -> Iterator[str]:
    predicted, machine = found["prediction"], found["machine"]
    yield ""
    yield (
        f"estimate: {predicted['generated_tok_s']:,.1f} tok/s generated, {predicted['prompt_tok_s']:,.1f} tok/s of "
        f"prompts; loading ~{duration(predicted['loading_s'])}, then {duration(predicted['seconds'])}"
    )
    if written := predicted["written_nbytes"]:
        yield f"loading writes {gib(written)} of prepared weights to disk, once (--disk 0 writes none)"
    yield f"bottleneck: {predicted['bottleneck']} ({_busy(predicted)})"
    if not machine["measured"]:
        yield "machine not measured: assuming a slow one; run moedge doctor"


def _busy(predicted: Mapping[str, Any]) -> str:
    shares = {name: seconds / predicted["seconds"] for name, seconds in predicted["busy_s"].items() if seconds}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def _curves(points: list[Mapping[str, Any]]) -> Iterator[str]:
    best = max((point["generated_tok_s"] or 0 for point in points), default=0) or 1
    for varied, curve in groupby(points, key=lambda point: point["varied"]):
        yield ""
        yield "tok/s by sequences" if varied == "sequences" else f"tok/s by {_NAMES[varied]}"
        points_of_curve = list(curve)
        shown = _until_flat(points_of_curve)
        for point in shown:
            rate = point["generated_tok_s"]
            value = f"{point['value']:,}" if varied == "sequences" else _budget(point["value"])
            if rate is None:
                yield f"{value:>12}  does not fit"
                continue
            more = "  and with more" if point is shown[-1] and len(shown) < len(points_of_curve) else ""
            yield f"{value:>12}  {rate:>9,.1f}  {'#' * max(1, round(WIDTH * rate / best))}{more}"


def _budget(nbytes: int) -> str:
    """As a person would give it: `8 GiB`, `2.5 GiB`, `768 MiB`."""
    return f"{nbytes / 2**30:.1f}".removesuffix(".0") + " GiB" if nbytes >= 2**31 else f"{nbytes / 2**20:.0f} MiB"


def _until_flat(curve: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the points at its end that say the same as the one before them."""
    count = len(curve)
    while count > 1 and curve[count - 1]["generated_tok_s"] == curve[count - 2]["generated_tok_s"]:
        count -= 1
    return curve[:count]


def _suggestions(found: Mapping[str, Any]) -> Iterator[str]:
    suggestions = found["suggestions"]
    yield ""
    if not suggestions:
        yield "no single change gains more than 5 %"
    for each in suggestions:
        yield f"{each['change']:>16}  {each['generated_tok_s']:,.1f} tok/s, {each['gain']:.2f} times as fast"


def _explanation(found: Mapping[str, Any]) -> Iterator[str]:
    plan, predicted = found["plan"], found["prediction"]
    yield ""
    yield from _subtraction(found)
    yield "weight formats, from exact to lossy, each with the best passes that fit, loading and writing counted:"
    taken_s = found["formats"][plan["quant"]]
    for name, seconds in found["formats"].items():
        taken = " <- taken" if name == plan["quant"] else ""
        yield f"{name:>12}  {duration(seconds)}, {seconds / taken_s:.2f} times this plan's time{taken}"
    yield (
        "auto takes the checkpoint's own precision where all of it fits, else the least lossy format that takes "
        "at most 1.5 times as long as the fastest"
    )
    loading = found["loading"]
    steps = {name.removesuffix("_s").replace("_", " "): loading[name] for name in loading if name.endswith("_s")}
    yield f"loading: {', '.join(f'{name} {duration(seconds)}' for name, seconds in steps.items() if seconds)}"
    held = plan["held_nbytes"] / plan["weights_nbytes"]
    yield f"{held:.0%} of the weights are held; {gib(predicted['disk_nbytes'])} are read from disk in all"
    passes, sequences = predicted["passes"], predicted["sequences"]
    yield f"{passes:,.0f} passes with {sequences:,.0f} sequences, at the rates that docs/plan.md lists"


def _subtraction(found: Mapping[str, Any]) -> Iterator[str]:
    """What of each budget is left for weights, and what share of all weights that is."""
    plan = found["plan"]
    for tier in found["tiers"]:
        name, parts = _NAMES[tier["tier"]], tier["parts"]
        weights = sum(parts.get(each, 0) for each in _WEIGHTS)
        if tier["tier"] == "disk":
            if store := sum(parts.values()):
                streamed = _on_disk(plan) / plan["weights_nbytes"]
                yield f"{name}: {gib(store)} of prepared weights, of which passes read {streamed:.0%}; written once"
            continue
        needed = [f"{part} {gib(nbytes)}" for part, nbytes in parts.items() if nbytes >= _LEAST_SHOWN]
        needed = [part for part in needed if not part.startswith(_WEIGHTS)]
        left = tier["budget"] - sum(nbytes for part, nbytes in parts.items() if part not in _WEIGHTS)
        yield (
            f"{name} {gib(tier['budget'])}: {' + '.join(needed)} leave {gib(left)} for weights of "
            f"{gib(plan['weights_nbytes'])}; {gib(weights)} are held ({weights / plan['weights_nbytes']:.0%})"
        )


def _on_disk(plan: Mapping[str, Any]) -> int:
    staging = plan["staging"]
    nbytes: int = plan["weights_nbytes"] - plan["held_nbytes"] if staging is None else staging["disk_nbytes"]
    return nbytes
