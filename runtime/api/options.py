"""The keyword arguments of `LLM`, `plan` and `run_batch`: the options of the commands, named and meant as there.

Torch-free. Every one has a default; what they mean is in `moedge COMMAND --help` and docs/python.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from ...moe.streaming_mode import ExpertOptions, Mode
from ..rows.columns import rows_as
from ..rows.fields import kwargs_setting
from ..rows.row import Defaults
from ..rows.tables import InputFormat
from ..sampling.params import LIMITS
from ..settings.budgets import Budgets
from ..settings.errors import BadArgument, SettingError, shown
from ..settings.settings import Settings

Size = str | int
DType = Literal["auto", "bf16", "fp16", "fp32"]
Quant = Literal["auto", "none", "int8", "int4", "nf4", "mxfp4", "kept"]
Compute = Literal["auto", "float", "int8"]
KVCacheFormat = Literal["auto", "bf16", "fp16", "fp32", "int8", "int8/int4", "int4"]
Attention = Literal["auto", "torch", "native", "triton"]
Stream = Literal["auto", "all", "wanted", "wanted+forecast"]
RowFormat = Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "txt"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Task = Literal["summarize", "extract", "classify", "translate", "qa"]
LongDocuments = Literal["map-reduce", "split", "error"]
RowsFor = Literal["document", "chunk"]

_CHOICES = {
    "dtype": get_args(DType),
    "quant": get_args(Quant),
    "compute": get_args(Compute),
    "kv": get_args(KVCacheFormat),
    "attention": get_args(Attention),
    "stream": get_args(Stream),
    "reasoning_effort": get_args(ReasoningEffort),
    "input_format": get_args(RowFormat),
    "task": get_args(Task),
    "long": get_args(LongDocuments),
    "each": get_args(RowsFor),
}
# Options that somebody else sets where they are None: the model, or a row.
_UNSET = ("temperature", "max_thinking_tokens", "reasoning_effort", "task", "long")
_TEXTS = ("prompt_column", "id_column", "fields", "reader", "ocr", "ray")
_TEXTS_OR_FILES = ("prompt", "system", "schema", "merge_prompt", "cache")
_SIZES = ("ram", "gpu_mem", "disk")
_COUNTS = (
    "tokens_per_pass", "max_sequences", "max_model_len", "max_rows", "rows", "prompt_tokens", "output_tokens",
    "chunk_tokens", "workers", "sample", "ray_workers",
)  # fmt: skip


class ClusterOptions(TypedDict, total=False):
    """A job on the Ray cluster at the address `ray` ("local": one on this machine), with `ray_workers` engines."""

    ray: str | None
    ray_workers: int | None


class EngineOptions(TypedDict, total=False):
    """How a model is computed, and with what memory: budgets are bytes, or a text such as "7GiB", "80%" or "auto".

    `ram` is the budget of the whole process. `gpu_mem` 0 computes on the CPU.
    """

    ram: Size
    gpu_mem: Size
    disk: Size
    disk_dir: str | Path | None
    dtype: DType
    quant: Quant
    compute: Compute
    kv: KVCacheFormat
    attention: Attention
    deterministic: bool
    tokens_per_pass: int | None
    max_sequences: int | None


class StreamingOptions(TypedDict, total=False):
    """Which experts are read in a pass, and which are held in memory."""

    stream: Stream


class WorkloadOptions(TypedDict, total=False):
    """What a plan is made for where no rows are known: 1,000 of 512 prompt tokens and 256 generated ones."""

    rows: int
    prompt_tokens: int
    output_tokens: int


# What is planned for where no rows are known, as by `moedge plan`.
EQUAL_ROWS = {"rows": 1000, "prompt_tokens": 512, "output_tokens": 256}


class LLMOptions(EngineOptions, StreamingOptions, WorkloadOptions, total=False):
    """`max_model_len` tokens has a sequence at most, prompt and answer (by default 4,096, or the smaller context).

    The plan is made once, for `rows` of `prompt_tokens` and `output_tokens`; any other number of prompts works, too.
    `seed` is what sampled prompts draw from that have no seed of their own.
    """

    max_model_len: int | None
    seed: int


class RowOptions(TypedDict, total=False):
    """What rows are read from the input file, and what their prompts are made of (docs/how-to-batches.md).

    `prompt` and `system` are templates, or files of one; `schema` is a file with the JSON schema of every answer.
    """

    input_format: RowFormat
    prompt_column: str | None
    id_column: str | None
    prompt: str | Path | None
    system: str | Path | None
    schema: str | Path | None
    chat: bool | None


class PlanOptions(EngineOptions, WorkloadOptions, RowOptions, total=False):
    """`max_tokens` are generated for rows of an input file that do not say. `machine` is a file of `moedge doctor`.

    `gpu` is the name of a GPU to plan for by its data sheet, such as "RTX 3060 12GB".
    """

    max_tokens: int
    machine: str | Path | None
    gpu: str | None


class DocumentOptions(EngineOptions, StreamingOptions, ClusterOptions, total=False):
    """The options of `moedge docs` (docs/documents.md): what is asked about every document, and how files are read.

    `prompt`, `system` and `merge_prompt` are templates, or files of one; `schema` is a file of a JSON schema, or
    `module:Class` of a pydantic model, and `fields` its short form. `failed` runs failed rows again. The others are
    those of `BatchOptions`.
    """

    prompt: str | Path | None
    system: str | Path | None
    task: Task | None
    schema: str | Path | None
    fields: str | None
    merge_prompt: str | Path | None
    long: LongDocuments | None
    each: RowsFor
    chunk_tokens: int | None
    overlap: int
    include: list[str] | None
    exclude: list[str] | None
    reader: str | None
    ocr: str | None
    cache: str | Path | None
    mirror: str | Path | None
    workers: int | None
    sample: int | None
    max_tokens: int
    temperature: float
    seed: int
    reasoning_effort: ReasoningEffort | None
    max_thinking_tokens: int | None
    chat_template_kwargs: str | Mapping[str, Any] | None
    plan: str | Path | None
    until: str | None
    max_rows: int | None
    max_failures: str | int | None
    failed: bool
    accept_drift: str | list[str] | None


class JobOptions(RowOptions, total=False):
    """`max_tokens`, `temperature` and `seed` are for rows that do not say.

    A `temperature` of None is that of the model's generation_config.json, else 0. `reasoning_effort`,
    `max_thinking_tokens` and `chat_template_kwargs` (a dict, or the text of a JSON object) are for chat rows that do
    not say.
    The job stops early at the time of day `until` ("07:00"), after `max_rows`, or beyond `max_failures` (10, "5%").
    `overwrite` removes the job of this output and its files first; `partial` appends answers to a file while it runs.
    """

    max_tokens: int
    temperature: float | None
    seed: int
    reasoning_effort: ReasoningEffort | None
    max_thinking_tokens: int | None
    chat_template_kwargs: str | Mapping[str, Any] | None
    lenient: bool
    until: str | None
    max_rows: int | None
    max_failures: str | int | None
    accept_drift: str | list[str] | None
    overwrite: bool
    partial: bool


class BatchOptions(EngineOptions, StreamingOptions, JobOptions, ClusterOptions, total=False):
    """Those of a job that loads an engine of its own; `plan` is a file of `moedge plan --save`."""

    plan: str | Path | None


def check(options: Mapping[str, Any], kind: type) -> None:
    """Raises BadArgument for an option that `kind`, one of the classes above, does not have, or a wrong value."""
    known = kind.__annotations__
    for name, value in options.items():
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise BadArgument(f"{name} is not an option; {advice}")
        if wanted := _wanted(name, value):
            raise BadArgument(f"{name} must be {wanted}; found {shown(value)}")


def _wanted(name: str, value: Any) -> str:
    """What an option takes where `value` is something else; empty where it is fine, or checked by whoever uses it."""
    if value is None and name in _UNSET:
        return ""
    if name in _CHOICES:
        return "" if value in _CHOICES[name] else f"one of {', '.join(_CHOICES[name])}"
    if name in _TEXTS:
        return "" if value is None or isinstance(value, str) else "a string"
    if name in _TEXTS_OR_FILES:
        return "" if value is None or isinstance(value, str | Path) else "a string or a path"
    if name == "chat":
        return "" if value is None or isinstance(value, bool) else "True, False or None"
    if name in _SIZES:
        fine = isinstance(value, str) or (type(value) is int and value >= 0)
        return "" if fine else 'a number of bytes, or a size such as "7GiB"'
    if name in LIMITS:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and value in LIMITS[name]
        return "" if fine and (name == "temperature" or type(value) is int) else str(LIMITS[name])
    if name in _COUNTS:
        return "" if value is None or (type(value) is int and value >= 1) else "a whole number from 1"
    return ""


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Those of the options that say how a model is computed."""
    return Settings(**{name: options[name] for name in Settings.__dataclass_fields__ if name in options})


def budgets_of(options: Mapping[str, Any]) -> Budgets:
    """Those of the options that say with what memory."""
    sizes = {name: _text(options[name]) for name in _SIZES if name in options}
    folder = options.get("disk_dir")
    return Budgets(**sizes, disk_dir=None if folder is None else Path(folder))


def experts_of(options: Mapping[str, Any]) -> ExpertOptions:
    """Those of the options that say how experts are streamed."""
    stream = options.get("stream", "auto")
    return ExpertOptions(None if stream == "auto" else Mode(stream))


def input_format_of(options: Mapping[str, Any]) -> InputFormat:
    """The one of the options that says what the input file is."""
    return InputFormat(options.get("input_format", "auto"))


def row_defaults_of(options: Mapping[str, Any], defaults: Defaults) -> Defaults:
    """`defaults` with those of the options that say what prompts are made of. Raises InputUnreadable, MissingExtra."""
    prompt, system, schema = options.get("prompt"), options.get("system"), options.get("schema")
    return rows_as(
        defaults,
        options.get("prompt_column"),
        options.get("id_column"),
        None if prompt is None else str(prompt),
        None if system is None else str(system),
        None if schema is None else Path(schema),
        options.get("chat"),
    )


def template_variables_of(options: Mapping[str, Any]) -> str:
    """What chat templates get for every row, as the text of a JSON object. Raises BadArgument."""
    given = options.get("chat_template_kwargs")
    if given is None:
        return ""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        return kwargs_setting(text, "chat_template_kwargs")
    except (SettingError, TypeError, ValueError) as error:
        raise BadArgument(f"chat_template_kwargs must be an object of JSON: {error}") from None


def _text(size: Size) -> str:
    """As the command line takes it."""
    if isinstance(size, int):
        return f"{size}B" if size else "0"
    return size
