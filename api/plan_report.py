"""What `moedge plan` says, as an object: the document, and the text and the HTML that show it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rich.console import Console
from rich.text import Text

from .energy import energy_lines, energy_of
from .formatting import count, duration, escape_controls, fit, formats_line, kernel_lines, speed
from .offload.budget import gib
from .runtime.jobs.job_plan import equal_rows, measured_job, plan_request, refuse_unknown_machine, with_head
from .runtime.jobs.request import budgets_of, input_format_of, row_defaults_of, settings_of
from .runtime.plan.kernels import Kernels
from .runtime.plan.planner import PlanRequest, PlanResult, solve
from .runtime.settings.errors import DoesNotFit, counted
from .runtime.settings.option import check, options_of, with_options
from .runtime.settings.options import PlanOptions
from .runtime.source.model_source import Headers, read_headers
from .what_if import by_budget, by_sequences, document, nearest, refusal, suggestions

if TYPE_CHECKING:
    from .runtime.jobs.encode import JobSize
    from .runtime.rows.preflight import Preflight


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport:
    """What fits where, how fast a job will be, what it waits for and what would help, before a weight is read.

    `document` is JSON (docs/reference.md): bytes, seconds, and tokens per second. `fits` says whether there is a
    plan, and `result` is it; else `document` has the reason and what would fit. Printed, or shown in a notebook, it is
    the text of `moedge plan`. `left_out` says in lines which rows of the input it is not made for.
    """

    document: Mapping[str, Any]
    result: PlanResult | None = field(default=None, compare=False)
    left_out: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.result is not None

    @property
    def generated_tok_s(self) -> float | None:
        """Generated tokens per second, as predicted; None where nothing fits."""
        return None if self.result is None else self.result.prediction.generated_tok_s

    def json(self) -> str:
        """The document as text."""
        return json.dumps(self.document, indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the plan for `moedge batch --plan FILE` and `run_batch(..., plan=FILE)`. Raises DoesNotFit."""
        if not self.fits:
            raise DoesNotFit(str(self.document["reason"]))
        Path(path).write_text(self.json() + "\n")

    def print(self, explain: bool = False, console: Console | None = None) -> None:
        """Prints the text; `explain` adds what was compared, and what the numbers are based on."""
        console = console or Console(highlight=False, markup=False, soft_wrap=True)
        _print(self.document, explain, console)

    def __repr__(self) -> str:
        stream = StringIO()
        self.print(console=Console(file=stream, highlight=False, markup=False, soft_wrap=True))
        return stream.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        console = Console(file=StringIO(), record=True, highlight=False, markup=False, soft_wrap=True)
        self.print(console=console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


@with_options(PlanOptions)
def plan(model: str | Path, input_file: str | Path | None = None, **options: Unpack[PlanOptions]) -> PlanReport:
    """What `moedge plan` says of a model and a job; reads headers only, and loads no torch but to count tokens.

    The rows of `input_file` are measured; without it the job is `rows` of `prompt_tokens` and `max_tokens` each
    (1,000 of 512 and 256). Budgets are bytes or texts such as "7GiB" (`PlanOptions`). A job that does not fit is a
    report too. Raises BadArgument, ModelNotFound, UnsupportedModel, SettingError, BadSize.
    """
    check(options, PlanOptions)
    return make_report(str(model), None if input_file is None else Path(input_file), options)


def make_report(model: str, input_file: Path | None, options: Mapping[str, Any]) -> PlanReport:
    """The same for options that are checked; those that `PlanOptions` does not have are ignored."""
    cost = energy_of(options)
    profile, gpu = options.get("machine"), options.get("gpu")
    machine = None if profile is None else Path(profile)
    refuse_unknown_machine(machine, gpu)
    headers, size = read_headers(model), None
    notes: tuple[str, ...] = ()
    if input_file is not None:
        size, found = measured_job(headers, input_file, row_defaults_of(options), input_format_of(options))
        size.refuse_if_none_runs(found)
        notes = tuple(_left_out(found, size))
    if size is None:
        workload = equal_rows(
            *(options.get(key, options_of(PlanOptions)[key].default) for key in ("rows", "prompt_tokens", "max_tokens"))
        )
    else:
        workload = size.shape()
    if size is None and workload.longest > headers.shape.context:
        notes = (
            f"rows of {workload.longest:,} tokens, prompt and answer, are longer than the model's context of "
            f"{headers.shape.context:,}: a job would answer none (--prompt-tokens, --max-tokens)",
        )

    def requested(each: Headers) -> PlanRequest:
        return plan_request(each, settings_of(options), budgets_of(options), machine, workload, gpu)

    request = requested(headers)
    try:
        result = with_head(solve(request), requested, headers)
    except DoesNotFit as error:
        return PlanReport(refusal(model, request, str(error), nearest(request)), left_out=notes)
    request = result.request
    points = [*by_sequences(request, result), *by_budget(request, result)]
    # Rows of equal length fit all of them or not at all.
    left_out = 0 if size is None else size.longer_than(result.plan.kv_tokens)
    shown = document(headers.name, result, points, suggestions(request, result), left_out, headers.download)
    if cost is not None:
        job, predicted = shown["job"], shown["prediction"]
        tokens = job["prompt_tokens"], job["generated_tokens"]
        shown["energy"] = cost.of(predicted["loading_s"] + predicted["seconds"], job["sequences"], *tokens)
    return PlanReport(shown, result, notes)


def _left_out(found: Preflight, size: JobSize) -> Iterator[str]:
    invalid = found.num_rows - sum(found.rows.values())
    if invalid or found.file_problems.total:
        yield found.report(lenient=True)
        yield f"planned without {counted(invalid, 'invalid row')}"
    if size.too_long:
        yield f"planned without {counted(size.too_long, 'row')} longer than the model's context"


# Columns of the longest bar, and of what is before a bar: a size and the name of an arena, or a point of a curve.
WIDTH, _SHORTEST = 30, 10
_BEFORE_PART, _BEFORE_BAR = 13, 25
_KEPT, _FIXED = "cyan", "bright_black"
# What an arena is for, in colours; what has none here is scratch.
COLOURS = {
    "weights held": "green",
    "weights staged for the device": "green",
    "rings of streamed weights": "green",
    "store of weights": "green",
    "KV cache": _KEPT,
    "KV cache in host memory": _KEPT,
    "windows to KV in host memory": _KEPT,
    "states of recurrent layers": _KEPT,
    "parked blocks": _KEPT,
    "process": _FIXED,
    "context and libraries": _FIXED,
    "small parameters": _FIXED,
}
# Arenas as --explain subtracts them, before what is left for weights that stay.
_WEIGHTS = ("weights held", "weights staged for the device")
_NAMES = {"host": "RAM", "device": "GPU memory", "disk": "disk"}
# Columns where nobody says how wide the terminal is.
_WIDE = 76
_LEAST_SHOWN = 1 << 20


def _print(found: Mapping[str, Any], explain: bool, console: Console) -> None:
    width = console.width if console.is_terminal else None

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(fit(escape_controls(line), width))

    if not found["fits"]:
        say([f"does not fit: {found['reason']}"])
        if found["nearest"]:
            say([f"nearest that fits: {'; or '.join(found['nearest'])}"])
        return
    say(_head(found))
    block = "#" if console.options.ascii_only else "█"
    for line in _memory(found["tiers"], width or _WIDE, block):
        console.print(line)
    say((*_speed(found), *_curves(found, width or _WIDE, block), *_suggestions(found)))
    if explain:
        say(_explanation(found))


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
        f"{counted(job['sequences'], 'row')} of {job['prompt_tokens'] / job['sequences']:,.0f} prompt tokens and up to "
        f"{job['generated_tokens'] / job['sequences']:,.0f} generated tokens; the longest row has {job['longest']:,}"
    )
    yield (
        f"plan: {formats_line(plan)}; "
        f"{counted(plan['max_sequences'], 'sequence')} per batch, {plan['tokens_per_pass']:,} tokens per pass; "
        f"{_held(found)}"
    )
    yield from _host_kv(found)
    if rate := found["without_cpu_experts"]:
        by_cpu = found["prediction"]["cpu_experts"]
        yield f"the CPU computes some {by_cpu:,.0f} experts a pass beside the link; --cpu-experts off: {speed(rate)}"
    yield f"to compute: {Kernels(**found['kernels'])}"
    if plan["free_tokens"]:
        yield f"drafts tokens: passes of up to {plan['free_tokens'][-1]:,} tokens take as long"
    elif plan["placement"]["expert_ring"] or plan["placement"]["dense_ring"]:
        yield f"drafts no tokens: {plan['undrafted']}"
    yield from kernel_lines(plan["lacks"], plan["notes"])
    if left_out := found["left_out"]:
        yield (
            f"{counted(left_out['rows'], 'row')} may need more than the {plan['kv_tokens']:,} tokens that fit: "
            f"error rows; {left_out['takes']} runs all"
        )
    yield ""


def _host_kv(found: Mapping[str, Any]) -> Iterator[str]:
    """Where keys and values lie, where not all are on the GPU, and what the other choice would give."""
    plan, rate = found["plan"], found["without_host_kv"]
    if hosted := plan["host_kv"]:
        yield (
            f"keys and values: {counted(plan['kv_sequences'], 'sequence')} at full length on the GPU, "
            f"{hosted['sequences']:,} in RAM ({counted(hosted['count'], 'cohort')}, {_attended(found, hosted)}); "
            f"all on the GPU: {'does not fit' if rate is None else speed(rate)}"
        )


def _attended(found: Mapping[str, Any], hosted: Mapping[str, Any]) -> str:
    """How sequences in RAM are attended to, and what the other choice would give."""
    if (rate := found["without_cpu_attention"]) is None:
        return f"{gib(hosted['nbytes'])} cross the link in every pass"
    return f"the CPU attends to them, --cpu-attention off: {speed(rate)}"


def _layers(model: Mapping[str, Any]) -> str:
    if not model["experts"]:
        return counted(model["layers"], "layer")
    each, used = model["experts_per_layer"], model["experts_per_token"]
    return f"{counted(model['layers'], 'layer')} x {each} experts, {used} per token"


def _held(found: Mapping[str, Any]) -> str:
    """The share of the weights, or the number of experts, that stays in the memory that computes."""
    plan, experts = found["plan"], found["model"]["experts"]
    if not experts:
        return f"holds {plan['held_nbytes'] / plan['weights_nbytes']:.0%} of the weights"
    return f"holds {sum(plan['placement']['held_experts']):,} of {experts:,} experts"


def _memory(tiers: list[Mapping[str, Any]], width: int, block: str) -> Iterator[Text]:
    """What each tier holds, a line each with a bar where there is room; less than a MiB counts in the sums only."""
    for tier in tiers:
        parts, budget = {name: nbytes for name, nbytes in tier["parts"].items() if nbytes}, tier["budget"]
        if budget is None and not parts:
            continue
        used = sum(parts.values())
        of_budget = f"{gib(used)} used" if budget is None else f"{gib(budget)}, {gib(max(0, budget - used))} free"
        yield Text(f"{_NAMES[tier['tier']]} {of_budget}", style="bold")
        shown = {name: nbytes for name, nbytes in parts.items() if nbytes >= _LEAST_SHOWN}
        columns = max(map(len, shown), default=0)
        longest = min(WIDTH, width - _BEFORE_PART - columns)
        longest = longest if longest >= _SHORTEST else 0
        for name, nbytes in shown.items():
            line = Text(f"{gib(nbytes):>10} {name}")
            if longest and budget:
                line.append(" " * (columns - len(name) + 2))
                line.append(block * max(1, round(longest * nbytes / budget)), COLOURS.get(name, "yellow"))
            yield line


def _speed(found: Mapping[str, Any]) -> Iterator[str]:
    predicted, machine = found["prediction"], found["machine"]
    yield ""
    yield (
        f"estimate: {speed(predicted['generated_tok_s'])} generated, {speed(predicted['prompt_tok_s'])} of "
        f"prompts; loading ~{duration(predicted['loading_s'])}, then {duration(predicted['seconds'])}"
    )
    if written := predicted["written_nbytes"]:
        yield f"loading writes {gib(written)} of prepared weights to disk, once (--disk 0 writes none)"
    elif _reads_checkpoint(found):
        yield READS_CHECKPOINT
    yield f"bottleneck: {_busy(predicted)}"
    if energy := found.get("energy"):
        yield from energy_lines(energy)
    if not machine["measured"]:
        yield "machine not measured: assuming a slow one; run `moedge doctor`"


READS_CHECKPOINT = "0 GiB to write: every pass reads the checkpoint's own files"


def _reads_checkpoint(found: Mapping[str, Any]) -> bool:
    """Whether passes read a disk where nothing is written; without a budget, prepared weights are the model."""
    (disk,) = (tier for tier in found["tiers"] if tier["tier"] == "disk")
    return _on_disk(found["plan"]) > 0 and not sum(disk["parts"].values()) and disk["budget"] is not None


def _busy(predicted: Mapping[str, Any]) -> str:
    """`compute (100%)`, or `disk (95%; compute 40%)` where other resources are busy, too."""
    shares = {name: seconds / predicted["seconds"] for name, seconds in predicted["busy_s"].items() if seconds}
    name = predicted["bottleneck"]
    most = f"{shares.pop(name, 0.0):.0%}"
    others = [f"{other} {share:.0%}" for other, share in sorted(shares.items(), key=lambda item: -item[1])]
    return f"{name} ({'; '.join([most, *others])})"


def _curves(found: Mapping[str, Any], width: int, block: str) -> Iterator[str]:
    """Rates of each variation's own plan; the weight format is said where it is another than the plan's."""
    points, quant = found["points"], found["plan"]["quant"]
    longest = min(WIDTH, width - _BEFORE_BAR - max((len(point["quant"] or "") for point in points), default=0) - 2)
    best = max((point["generated_tok_s"] or 0 for point in points), default=0) or 1
    for varied, curve in groupby(points, key=lambda point: point["varied"]):
        yield ""
        yield "tok/s by number of sequences" if varied == "sequences" else f"tok/s by {_NAMES[varied]} budget"
        points_of_curve = list(curve)
        shown = _until_flat(points_of_curve)
        for point in shown:
            rate = point["generated_tok_s"]
            value = f"{point['value']:,}" if varied == "sequences" else _budget(point["value"])
            if rate is None:
                yield f"{value:>12}  does not fit"
                continue
            bar = block * max(1, round(longest * rate / best))
            other = f"  {point['quant']}" if point["quant"] != quant else ""
            more = "  (no gain from more)" if point is shown[-1] and len(shown) < len(points_of_curve) else ""
            if len(bar + other + more) > width - _BEFORE_BAR:
                more = ""
            yield f"{value:>12}  {rate:>9,.1f}  {bar}{other}{more}"


def _budget(nbytes: int) -> str:
    """As a person would give it: `8 GiB`, `2.5 GiB`, `768 MiB`."""
    return f"{nbytes / 2**30:.1f}".removesuffix(".0") + " GiB" if nbytes >= 2**31 else f"{nbytes / 2**20:.0f} MiB"


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
        note = f": {each['note']}" if each["note"] else ""
        yield f"{each['change']:>16}  {speed(each['generated_tok_s'])}, {each['gain']:.2f}x{note}"


def _explanation(found: Mapping[str, Any]) -> Iterator[str]:
    plan, predicted = found["plan"], found["prediction"]
    yield ""
    yield from _subtraction(found)
    yield "weight formats, from exact to lossy, each with its fastest plan that fits, loading included:"
    chosen_s = found["formats"][plan["quant"]]
    for name, seconds in found["formats"].items():
        chosen = " <- chosen" if name == plan["quant"] else ""
        yield f"{name:>12}  {duration(seconds)}, {seconds / chosen_s:.2f}x this plan's time{chosen}"
    yield (
        "auto is the checkpoint's own precision if all of it fits, else the least lossy format that takes "
        "at most 1.5x the time of the fastest"
    )
    loading = found["loading"]
    steps = {name.removesuffix("_s").replace("_", " "): loading[name] for name in loading if name.endswith("_s")}
    yield f"loading: {', '.join(f'{name} {duration(seconds)}' for name, seconds in steps.items() if seconds)}"
    held = plan["held_nbytes"] / plan["weights_nbytes"]
    read = gib(predicted["disk_nbytes"])
    yield f"{held:.0%} of the weights stay in the memory that computes; {read} are read from disk in total"
    passes, sequences = predicted["passes"], predicted["sequences"]
    yield f"{passes:,.0f} passes with {sequences:,.0f} sequences, at the rates that docs/dev/internals.md lists"


def _subtraction(found: Mapping[str, Any]) -> Iterator[str]:
    """The part of each budget that is left for weights, and its share of all weights."""
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
