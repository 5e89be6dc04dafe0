"""`moedge plan`: what fits where, how fast it will be, and what would help, before a byte of weights is read.

The terminal shows what the JSON document holds: tiers with bars, the expected speed, and what would change it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..offload.errors import ExitCode
from ..runtime.settings.formatting import count, duration, gib, kernel_lines
from .options import options

if TYPE_CHECKING:
    from ..runtime.jobs.encode import JobSize
    from ..runtime.plan.planner import PlanRequest

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows as `moedge batch` takes them, to be measured.")
]
ROWS = Annotated[int, typer.Option("--rows", min=1, help="Rows of the job, where there is no INPUT.")]
PROMPT_TOKENS = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt, where there is no INPUT.")
]
OUTPUT_TOKENS = Annotated[
    int, typer.Option("--output-tokens", min=1, help="Tokens of an answer, where there is no INPUT.")
]
MACHINE = Annotated[
    Path | None, typer.Option("--machine", help="Plan for the machine that `moedge doctor --json` wrote to this file.")
]
EXPLAIN = Annotated[bool, typer.Option("--explain", help="Say what was weighed, and what the numbers rest on.")]
JSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: docs/plan.md.")]
SAVE = Annotated[Path | None, typer.Option("--save", help="Write the plan, for `moedge batch --plan FILE`.")]


def plan(
    model: options.MODEL,
    input_file: INPUT = None,
    rows: ROWS = 1000,
    prompt_tokens: PROMPT_TOKENS = 512,
    output_tokens: OUTPUT_TOKENS = 256,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    max_tokens: options.MAX_TOKENS = 256,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    machine: MACHINE = None,
    explain: EXPLAIN = False,
    as_json: JSON = False,
    save: SAVE = None,
) -> None:
    """Say what fits where, how fast a job will be and what it waits for; reads headers only, and loads no torch.

    Exits with 4 where the job does not fit, and says what would.
    """
    from ..runtime.jobs.job_plan import equal_rows, measured_job, plan_request
    from ..runtime.settings.settings import Settings
    from ..runtime.source.headers import read_headers

    headers = read_headers(model)
    size = None if input_file is None else measured_job(headers, input_file, max_tokens)
    workload = equal_rows(rows, prompt_tokens, output_tokens) if size is None else size.shape()
    settings = Settings(
        dtype=dtype,
        quant=quant,
        kv=kv,
        tokens_per_pass=tokens_per_pass,
        max_sequences=max_sequences,
        deterministic=deterministic,
        compute=compute,
    )
    budgets = options.budgets(ram, gpu_mem, disk, disk_dir)
    request = plan_request(headers, settings, budgets, machine, workload)
    raise typer.Exit(_answer(model, request, size, explain, as_json, save))


def _answer(
    model: str, request: PlanRequest, size: JobSize | None, explain: bool, as_json: bool, save: Path | None
) -> ExitCode:
    from ..runtime.plan.plan_file import document, refusal
    from ..runtime.plan.planner import solve
    from ..runtime.plan.what_if import by_budget, by_sequences, nearest, suggestions
    from ..runtime.settings.errors import DoesNotFit

    try:
        result = solve(request)
    except DoesNotFit as error:
        fitting = nearest(request)
        if as_json:
            print(json.dumps(refusal(model, request, str(error), fitting), indent=1))
        else:
            print_refusal(str(error), fitting)
        return ExitCode.DOES_NOT_FIT
    points = [*by_sequences(request, result), *by_budget(request, result)]
    # Rows of equal length fit all of them or not at all.
    left_out = 0 if size is None else size.longer_than(result.plan.kv_tokens)
    found = document(model, result, points, suggestions(request, result), left_out)
    text = json.dumps(found, indent=1)
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        print_plan(found, explain)
    return ExitCode.OK


WIDTH = 40
# One letter of a bar for each arena, in the order in which a tier lists them.
LETTERS = "-:.@^=#~"
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
    for line in (*_speed(found), *_curves(found["points"]), *_suggestions(found)):
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
        contents = ", ".join(
            f"{letter} {name} {gib(nbytes)}" for letter, (name, nbytes) in zip(LETTERS, parts.items(), strict=False)
        )
        table.add_row(tier["tier"], "-" if budget is None else gib(budget), gib(used), contents or "nothing")
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
    predicted = found["prediction"]
    yield ""
    yield (
        f"{predicted['generated_tok_s']:,.1f} tok/s generated, {predicted['prompt_tok_s']:,.1f} of prompts; all of it "
        f"in {duration(predicted['seconds'])} after loading"
    )
    yield f"passes wait for {_WAITS[predicted['bottleneck']]}: {_busy(predicted)}"
    if not found["machine"]["measured"]:
        yield "this machine was never measured: these are the speeds of a slow one; `moedge doctor` measures it"


def _busy(predicted: Mapping[str, Any]) -> str:
    shares = {name: seconds / predicted["seconds"] for name, seconds in predicted["busy_s"].items() if seconds}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def _curves(points: list[Mapping[str, Any]]) -> Iterator[str]:
    best = max((point["generated_tok_s"] or 0 for point in points), default=0) or 1
    for varied, curve in groupby(points, key=lambda point: point["varied"]):
        yield ""
        yield "tok/s by sequences together" if varied == "sequences" else f"tok/s by {varied} memory"
        points_of_curve = list(curve)
        shown = _until_flat(points_of_curve)
        for point in shown:
            rate = point["generated_tok_s"]
            value = f"{point['value']:,}" if varied == "sequences" else gib(point["value"])
            if rate is None:
                yield f"{value:>12}  does not fit"
                continue
            more = "  and with more" if point is shown[-1] and len(shown) < len(points_of_curve) else ""
            yield f"{value:>12}  {rate:>9,.1f}  {'#' * max(1, round(WIDTH * rate / best))}{more}"


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
        yield "nothing that was tried makes it faster by a twentieth"
    for each in suggestions:
        yield f"{each['change']:>16}  {each['generated_tok_s']:,.1f} tok/s, {each['gain']:.2f} times as fast"


def _explanation(found: Mapping[str, Any]) -> Iterator[str]:
    plan, predicted = found["plan"], found["prediction"]
    yield ""
    yield "weight formats, from exact to lossy, each with the best passes that fit:"
    for name, seconds in found["formats"].items():
        taken = " <- taken" if name == plan["quant"] else ""
        yield f"{name:>12}  {duration(seconds)}, {seconds / predicted['seconds']:.2f} times this plan's time{taken}"
    yield (
        "auto takes the checkpoint's own precision where all of it fits, else the least lossy format that takes "
        "at most 1.5 times as long as the fastest"
    )
    held = plan["held_nbytes"] / plan["weights_nbytes"]
    read = gib(predicted["disk_nbytes"])
    yield f"{held:.0%} of the weights are held where they compute; {read} are read from disk in all"
    passes, sequences = predicted["passes"], predicted["sequences"]
    yield f"{passes:,.0f} passes with {sequences:,.0f} sequences, at the rates that docs/plan.md lists"
