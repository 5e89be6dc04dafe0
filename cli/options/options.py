"""Options that several commands share, each declared once."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...offload.budget import BadSize, parse_size
from .paths import new_folder, own_file, readable_file

if TYPE_CHECKING:
    from ...runtime.settings.budgets import Budgets

# More bytes than `auto` keeps free on any machine.
_ANY_MACHINE = 1 << 62


def _size(text: str) -> str:
    """Checks a size and returns its text; its bytes depend on the machine."""
    try:
        parse_size(text, _ANY_MACHINE, _ANY_MACHINE)
    except BadSize as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _kwargs(text: str) -> str:
    """Checks variables of a chat template and returns their text in one spelling."""
    from ...runtime.rows.fields import kwargs_setting
    from ...runtime.settings.errors import SettingError

    try:
        return kwargs_setting(text)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint folder, prepared weights, or a hub id like Qwen/Qwen3-30B-A3B."),
]

INPUT = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        help="Rows: .jsonl (OpenAI batch format or short), .json, .csv, .tsv, .parquet, .txt, also .gz and .zst; or -.",
    ),
]


class Panel(StrEnum):
    """The headings under which `--help` lists options."""

    OUTPUT = "Output and progress"
    ROWS = "Rows and prompts"
    BUDGETS = "Memory and disk"
    PRECISION = "Formats and precision"
    SAMPLING = "Sampling, for rows that do not set it"
    STOPPING = "Stopping and resuming"
    TUNING = "Tuning"


class DType(StrEnum):
    AUTO, BF16, FP16, FP32 = "auto", "bf16", "fp16", "fp32"


class Quant(StrEnum):
    AUTO, NONE, INT8, INT4, NF4, MXFP4 = "auto", "none", "int8", "int4", "nf4", "mxfp4"
    KEPT = "kept"


class Arithmetic(StrEnum):
    AUTO, FLOAT, INT8 = "auto", "float", "int8"


class KV(StrEnum):
    AUTO, BF16, FP16, FP32 = "auto", "bf16", "fp16", "fp32"
    INT8, INT8_INT4, INT4 = "int8", "int8/int4", "int4"


class Attention(StrEnum):
    AUTO, TORCH, NATIVE, TRITON = "auto", "torch", "native", "triton"


class Stream(StrEnum):
    AUTO, ALL, WANTED, FORECAST = "auto", "all", "wanted", "wanted+forecast"


class Effort(StrEnum):
    NONE, MINIMAL, LOW, MEDIUM, HIGH, XHIGH = "none", "minimal", "low", "medium", "high", "xhigh"


class Progress(StrEnum):
    AUTO, BAR, PLAIN, NONE = "auto", "bar", "plain", "none"


class InputFormat(StrEnum):
    AUTO, JSONL, JSON, CSV, TSV, PARQUET, TXT = "auto", "jsonl", "json", "csv", "tsv", "parquet", "txt"


class Format(StrEnum):
    HUMAN, JSON = "human", "json"


DTYPE = Annotated[
    DType,
    typer.Option(
        "--dtype",
        envvar="MOEDGE_DTYPE",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="dtype to compute in; auto is the dtype of the checkpoint.",
    ),
]
QUANT = Annotated[
    Quant,
    typer.Option(
        "--quant",
        envvar="MOEDGE_QUANT",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="Quantize weights to this format; auto is the most precise one that fits, kept leaves a quantized "
        "checkpoint's codes as they are, and packs those that no format has in a byte a weight.",
    ),
]
COMPUTE = Annotated[
    Arithmetic,
    typer.Option(
        "--compute",
        envvar="MOEDGE_COMPUTE",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="int8 rounds activations, too, for --quant int8, int4, mxfp4; float does not; auto: the faster.",
    ),
]
KV_FORMAT = Annotated[
    KV,
    typer.Option(
        "--kv",
        envvar="MOEDGE_KV",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="KV cache format (keys/values); auto is --dtype where everything fits, else int8.",
    ),
]
ATTENTION = Annotated[
    Attention,
    typer.Option(
        "--attention",
        envvar="MOEDGE_ATTENTION",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="Attention backend; auto is the fastest that works here.",
    ),
]
MAX_TOKENS = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        envvar="MOEDGE_MAX_TOKENS",
        show_envvar=False,
        min=1,
        rich_help_panel=Panel.SAMPLING,
        help="max_tokens for rows that do not set it.",
    ),
]
STREAM = Annotated[
    Stream,
    typer.Option(
        "--stream",
        rich_help_panel=Panel.TUNING,
        help="Experts to read: all, those routed to, or also a forecast.",
    ),
]
TEMPERATURE = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        envvar="MOEDGE_TEMPERATURE",
        show_envvar=False,
        min=0.0,
        rich_help_panel=Panel.SAMPLING,
        help="Temperature for rows that do not set it; 0 is greedy. By default the model's generation_config.json "
        "says it, else 0.",
    ),
]
REASONING_EFFORT = Annotated[
    Effort | None,
    typer.Option(
        "--reasoning-effort",
        envvar="MOEDGE_REASONING_EFFORT",
        show_envvar=False,
        rich_help_panel=Panel.SAMPLING,
        help="reasoning_effort of the chat template, for rows that do not set it.",
    ),
]
MAX_THINKING_TOKENS = Annotated[
    int | None,
    typer.Option(
        "--max-thinking-tokens",
        envvar="MOEDGE_MAX_THINKING_TOKENS",
        show_envvar=False,
        min=0,
        rich_help_panel=Panel.SAMPLING,
        help="Most tokens of reasoning before a chat answer, for rows that do not set it.",
    ),
]
CHAT_TEMPLATE_KWARGS = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        envvar="MOEDGE_CHAT_TEMPLATE_KWARGS",
        show_envvar=False,
        metavar="JSON",
        parser=_kwargs,
        rich_help_panel=Panel.SAMPLING,
        help="Variables of the chat template as a JSON object, for rows that do not set them: "
        "'{\"enable_thinking\": false}'.",
    ),
]
SEED = Annotated[
    int,
    typer.Option(
        "--seed",
        envvar="MOEDGE_SEED",
        show_envvar=False,
        min=0,
        rich_help_panel=Panel.SAMPLING,
        help="Seed for rows that do not set one.",
    ),
]
TOKENS_PER_PASS = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-pass",
        envvar="MOEDGE_TOKENS_PER_PASS",
        show_envvar=False,
        min=1,
        rich_help_panel=Panel.TUNING,
        help="Most tokens per forward pass; chosen from the job and the memory by default.",
    ),
]
MAX_SEQUENCES = Annotated[
    int | None,
    typer.Option(
        "--max-sequences",
        envvar="MOEDGE_MAX_SEQUENCES",
        show_envvar=False,
        min=1,
        rich_help_panel=Panel.TUNING,
        help="Most sequences in a batch; chosen from the job and the memory by default.",
    ),
]
INPUT_FORMAT = Annotated[
    InputFormat,
    typer.Option(
        "--input-format",
        rich_help_panel=Panel.ROWS,
        help="Format of INPUT; auto goes by its suffix, and takes a pipe as JSON lines.",
    ),
]
PROMPT_COLUMN = Annotated[
    str | None,
    typer.Option(
        "--prompt-column",
        metavar="NAME",
        rich_help_panel=Panel.ROWS,
        help="The column, or field, that holds the prompt.",
    ),
]
ID_COLUMN = Annotated[
    str | None,
    typer.Option(
        "--id-column", metavar="NAME", rich_help_panel=Panel.ROWS, help="The column, or field, that holds the id."
    ),
]
PROMPT = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT|FILE",
        rich_help_panel=Panel.ROWS,
        help="Template of every prompt; {{ NAME }} is a column of the row.",
    ),
]
SYSTEM = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT|FILE",
        rich_help_panel=Panel.ROWS,
        help="Template of a system message before every prompt.",
    ),
]
SCHEMA = Annotated[
    Path | None,
    typer.Option(
        "--schema",
        metavar="FILE",
        callback=readable_file,
        rich_help_panel=Panel.ROWS,
        help="JSON schema of every answer, unless a row has its own.",
    ),
]
CHAT = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        rich_help_panel=Panel.ROWS,
        help="Prompts become messages of a user; by default those from columns do, if the model has a chat template.",
    ),
]
PLAN = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        callback=readable_file,
        rich_help_panel=Panel.BUDGETS,
        help="Run a plan written by `moedge plan --save` on this machine.",
    ),
]
RAY = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS|local",
        rich_help_panel=Panel.BUDGETS,
        help="Compute on the workers of this Ray cluster; budgets are those of each worker.",
    ),
]
RAY_WORKERS = Annotated[
    int | None,
    typer.Option(
        "--ray-workers",
        metavar="N",
        min=1,
        rich_help_panel=Panel.BUDGETS,
        help="Engines on the cluster; by default one per GPU, or per node.",
    ),
]
LENIENT = Annotated[
    bool,
    typer.Option(
        "--lenient",
        envvar="MOEDGE_LENIENT",
        show_envvar=False,
        rich_help_panel=Panel.ROWS,
        help="Write malformed lines as error rows instead of refusing the input.",
    ),
]
DETERMINISTIC = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        envvar="MOEDGE_DETERMINISTIC",
        show_envvar=False,
        rich_help_panel=Panel.PRECISION,
        help="Bit-identical results for a row in any batch, on one machine (slower).",
    ),
]
RAM = Annotated[
    str,
    typer.Option(
        "--ram",
        envvar="MOEDGE_RAM",
        show_envvar=False,
        metavar="SIZE",
        parser=_size,
        rich_help_panel=Panel.BUDGETS,
        help="RAM budget, never exceeded: 7GiB, 80%, auto.",
    ),
]
GPU_MEM = Annotated[
    str,
    typer.Option(
        "--gpu-mem",
        envvar="MOEDGE_GPU_MEM",
        show_envvar=False,
        metavar="SIZE",
        parser=_size,
        rich_help_panel=Panel.BUDGETS,
        help="GPU memory budget: 7GiB, 80%, auto, or 0 to run on the CPU.",
    ),
]
DISK = Annotated[
    str,
    typer.Option(
        "--disk",
        envvar="MOEDGE_DISK",
        show_envvar=False,
        metavar="SIZE",
        parser=_size,
        rich_help_panel=Panel.BUDGETS,
        help="Disk budget for all prepared weights: 60GiB, auto, or 0 for none.",
    ),
]
DISK_DIR = Annotated[
    Path | None,
    typer.Option(
        "--disk-dir",
        envvar="MOEDGE_DISK_DIR",
        show_envvar=False,
        callback=new_folder,
        rich_help_panel=Panel.BUDGETS,
        help="Folder for prepared weights; the user's cache by default.",
    ),
]
UNTIL = Annotated[
    str | None,
    typer.Option(
        "--until",
        envvar="MOEDGE_UNTIL",
        show_envvar=False,
        metavar="HH:MM",
        rich_help_panel=Panel.STOPPING,
        help="Stop at this time of day (resumable).",
    ),
]
MAX_ROWS = Annotated[
    int | None,
    typer.Option(
        "--max-rows",
        metavar="N",
        min=1,
        rich_help_panel=Panel.STOPPING,
        help="Stop after N rows of this run (resumable).",
    ),
]
MAX_FAILURES = Annotated[
    str | None,
    typer.Option(
        "--max-failures",
        envvar="MOEDGE_MAX_FAILURES",
        show_envvar=False,
        metavar="N|P%",
        rich_help_panel=Panel.STOPPING,
        help="Stop when more rows of the job than this have failed: a number, or a percentage.",
    ),
]
ACCEPT_DRIFT = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-drift",
        metavar="NAME",
        rich_help_panel=Panel.STOPPING,
        help="Continue although this setting differs from the original job (repeatable).",
    ),
]
SUMMARY = Annotated[
    Path | None,
    typer.Option(
        "--summary",
        callback=own_file,
        rich_help_panel=Panel.OUTPUT,
        help="Write a summary of the run to this file, as JSON.",
    ),
]
PARTIAL = Annotated[
    bool,
    typer.Option(
        "--partial",
        rich_help_panel=Panel.OUTPUT,
        help="Append answers to OUT's name with .partial.jsonl while the job runs.",
    ),
]
PROGRESS = Annotated[
    Progress,
    typer.Option(
        "--progress",
        envvar="MOEDGE_PROGRESS",
        show_envvar=False,
        rich_help_panel=Panel.OUTPUT,
        help="auto is a progress bar on a terminal, plain lines elsewhere.",
    ),
]
FORMAT = Annotated[
    Format,
    typer.Option(
        "--format", rich_help_panel=Panel.OUTPUT, help="json prints events on stdout, one per line: docs/events.md."
    ),
]
VERBOSE = Annotated[
    bool, typer.Option("--verbose", "-v", rich_help_panel=Panel.OUTPUT, help="Print all numbers of the run at its end.")
]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=Panel.OUTPUT, help="Print errors only.")]


def budgets(ram: str, gpu_mem: str, disk: str, disk_dir: Path | None) -> Budgets:
    """The budgets that the four options of that name ask for."""
    from ...runtime.settings.budgets import Budgets

    return Budgets(ram=ram, disk=disk, disk_dir=disk_dir, gpu_mem=gpu_mem)


def say_device(gpu_mem: str = "auto", wanted: bool = True) -> None:
    """Says on stderr which device computes under `--gpu-mem`: the first line of a command, before slow imports."""
    from ...runtime.doctor.packages import computing_line

    line = computing_line(gpu_mem)
    if wanted:
        with suppress(OSError):
            say(line)


def say(text: str) -> None:
    """Prints to stderr at once, wrapped at spaces on a terminal. Raises OSError."""
    from ...runtime.settings.formatting import fit

    print(fit(text, shutil.get_terminal_size().columns if sys.stderr.isatty() else None), file=sys.stderr, flush=True)
