"""`moedge plan`: estimates placement, speed and bottleneck before any weights are read.

The terminal shows the contents of the JSON document: tiers with bars, the expected speed, and what would change it.
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
from ..runtime.settings.errors import counted
from .options import options
from .options.paths import own_file, readable_file
from .views.formatting import count, duration, gib, kernel_lines

if TYPE_CHECKING:
    from ..runtime.jobs.encode import JobSize
    from ..runtime.plan.planner import PlanRequest

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows to plan for, in the format of `moedge batch`.")
]
ROWS = Annotated[int, typer.Option("--rows", min=1, help="Number of rows, without INPUT.")]
PROMPT_TOKENS = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens per prompt, without INPUT.")]
OUTPUT_TOKENS = Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens per answer, without INPUT.")]
MACHINE = Annotated[
    Path | None,
    typer.Option(
        "--machine", callback=readable_file, help="Plan for the machine that `moedge doctor --json` wrote to this file."
    ),
]
EXPLAIN = Annotated[bool, typer.Option("--explain", help="Explain which alternatives were compared.")]
JSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: docs/plan.md.")]
SAVE = Annotated[
    Path | None,
    typer.Option("--save", callback=own_file, help="Write the plan to this file, for `moedge batch --plan`."),
]


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
    """Estimate placement, speed and bottleneck before running (reads headers only).

    If the job does not fit, prints the nearest job that does and exits with 4.
    """
    from ..runtime.jobs.job_plan import equal_rows, measured_job, plan_request
    from ..runtime.settings.settings import Settings
    from ..runtime.source.headers import read_headers

    headers = read_headers(model)
    size = None if input_file is None else measured_job(headers, input_file, max_tokens)
    if size is not None:
        size.refuse_if_none_runs(str(input_file))
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
        f"{counted(job['sequences'], 'row')} of {job['prompt_tokens'] / job['sequences']:,.0f} prompt tokens and up to "
        f"{job['generated_tokens'] / job['sequences']:,.0f} generated tokens; the longest row has {job['longest']:,}"
    )
    yield (
        f"weights {plan['quant']}, KV cache {plan['kv']}, dtype {plan['dtype']}; "
        f"{counted(plan['max_sequences'], 'sequence')} per batch, {plan['tokens_per_pass']:,} tokens per pass"
    )
    yield from kernel_lines(plan["lacks"], plan["notes"])
    if left_out := found["left_out"]:
        yield (
            f"{counted(left_out['rows'], 'row')} may need more than the {plan['kv_tokens']:,} tokens that fit: "
            f"error rows; {left_out['takes']} runs all"
        )
    yield ""


def _tiers(tiers: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "budget", "used", "contents"):
        table.add_column(name, no_wrap=name != "contents", justify="right" if name in ("budget", "used") else "left")
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
    """Letters in proportion to the parts, at least one each; free memory is blank."""
    letters = "".join(
        letter * max(1, round(WIDTH * nbytes / budget)) for letter, nbytes in zip(LETTERS, parts, strict=False)
    )
    return letters[:WIDTH].ljust(WIDTH)


def _speed(found: Mapping[str, Any]) -> Iterator[str]:
    predicted = found["prediction"]
    yield ""
    yield (
        f"{predicted['generated_tok_s']:,.1f} tok/s generated, {predicted['prompt_tok_s']:,.1f} tok/s prompt; "
        f"{duration(predicted['seconds'])} in total after loading"
    )
    yield f"bottleneck: {_busy(predicted)}"
    if not found["machine"]["measured"]:
        yield "machine not measured: assuming a slow one; run `moedge doctor`"


def _busy(predicted: Mapping[str, Any]) -> str:
    """`compute (100%)`, or `disk (95%; compute 40%)` where other resources are busy, too."""
    shares = {name: seconds / predicted["seconds"] for name, seconds in predicted["busy_s"].items() if seconds}
    name = predicted["bottleneck"]
    most = f"{shares.pop(name, 0.0):.0%}"
    others = [f"{other} {share:.0%}" for other, share in sorted(shares.items(), key=lambda item: -item[1])]
    return f"{name} ({'; '.join([most, *others])})"


def _curves(points: list[Mapping[str, Any]]) -> Iterator[str]:
    best = max((point["generated_tok_s"] or 0 for point in points), default=0) or 1
    for varied, curve in groupby(points, key=lambda point: point["varied"]):
        yield ""
        yield "tok/s by number of sequences" if varied == "sequences" else f"tok/s by {varied} budget"
        points_of_curve = list(curve)
        shown = _until_flat(points_of_curve)
        for point in shown:
            rate = point["generated_tok_s"]
            value = f"{point['value']:,}" if varied == "sequences" else gib(point["value"])
            if rate is None:
                yield f"{value:>12}  does not fit"
                continue
            more = "  (no gain from more)" if point is shown[-1] and len(shown) < len(points_of_curve) else ""
            yield f"{value:>12}  {rate:>9,.1f}  {'#' * max(1, round(WIDTH * rate / best))}{more}"


def _until_flat(curve: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The curve without the equal points at its end."""
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
        yield f"{each['change']:>16}  {each['generated_tok_s']:,.1f} tok/s, {each['gain']:.2f}x"


def _explanation(found: Mapping[str, Any]) -> Iterator[str]:
    plan, predicted = found["plan"], found["prediction"]
    yield ""
    yield "weight formats, from exact to lossy, each with its fastest plan that fits:"
    for name, seconds in found["formats"].items():
        taken = " <- chosen" if name == plan["quant"] else ""
        yield f"{name:>12}  {duration(seconds)}, {seconds / predicted['seconds']:.2f}x this plan's time{taken}"
    yield (
        "auto is the checkpoint's own precision if all of it fits, else the least lossy format that takes "
        "at most 1.5x the time of the fastest"
    )
    held = plan["held_nbytes"] / plan["weights_nbytes"]
    read = gib(predicted["disk_nbytes"])
    yield f"{held:.0%} of the weights stay in the memory that computes; {read} are read from disk in total"
    passes, sequences = predicted["passes"], predicted["sequences"]
    yield f"{passes:,.0f} passes with {sequences:,.0f} sequences, at the rates that docs/plan.md lists"
