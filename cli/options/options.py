"""Options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...offload.budget import BadSize, parse_size

if TYPE_CHECKING:
    from ...moe.streaming_mode import ExpertOptions

# Larger than whatever may be taken off `auto`.
_ANY_MACHINE = 1 << 62


def _size(text: str) -> str:
    """The text of a size as it is, once it is one. What it comes to is known when the machine was looked at."""
    try:
        parse_size(text, _ANY_MACHINE, _ANY_MACHINE)
    except BadSize as error:
        raise typer.BadParameter(str(error)) from None
    return text


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint folder, a prepared store, or a hub id like Qwen/Qwen3-30B-A3B."),
]

INPUT = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT", help="Rows: OpenAI batch lines or short ones, .jsonl or .jsonl.gz; - is standard input."
    ),
]


class DType(StrEnum):
    AUTO, BF16, FP16, FP32 = "auto", "bf16", "fp16", "fp32"


class Quant(StrEnum):
    AUTO, NONE, INT8, INT4, NF4 = "auto", "none", "int8", "int4", "nf4"


class Arithmetic(StrEnum):
    AUTO, INT8 = "auto", "int8"


class KV(StrEnum):
    AUTO, BF16, FP16, FP32 = "auto", "bf16", "fp16", "fp32"
    INT8, INT8_INT4, INT4 = "int8", "int8/int4", "int4"


class Attention(StrEnum):
    AUTO, TORCH, TRITON = "auto", "torch", "triton"


class Stream(StrEnum):
    AUTO, ALL, WANTED, FORECAST = "auto", "all", "wanted", "wanted+forecast"


class Hold(StrEnum):
    POPULAR, LRU = "popular", "lru"


class Progress(StrEnum):
    AUTO, BAR, PLAIN, NONE = "auto", "bar", "plain", "none"


class Format(StrEnum):
    HUMAN, JSON = "human", "json"


DTYPE = Annotated[
    DType,
    typer.Option(
        "--dtype",
        envvar="MOEDGE_DTYPE",
        show_envvar=False,
        help="Precision of the arithmetic; auto is the checkpoint's own.",
    ),
]
QUANT = Annotated[
    Quant,
    typer.Option(
        "--quant",
        envvar="MOEDGE_QUANT",
        show_envvar=False,
        help="Weights in memory; auto is the least lossy format that fits.",
    ),
]
COMPUTE = Annotated[
    Arithmetic,
    typer.Option(
        "--compute",
        envvar="MOEDGE_COMPUTE",
        show_envvar=False,
        help="int8 rounds activations, too: faster prompts on many CPUs, with weights in int8.",
    ),
]
KV_FORMAT = Annotated[
    KV,
    typer.Option(
        "--kv",
        envvar="MOEDGE_KV",
        show_envvar=False,
        help="Format of the KV cache (keys/values); auto is the arithmetic's own where all fits, else int8.",
    ),
]
ATTENTION = Annotated[
    Attention,
    typer.Option(
        "--attention",
        envvar="MOEDGE_ATTENTION",
        show_envvar=False,
        help="What computes attention; auto is the fastest that can.",
    ),
]
MAX_TOKENS = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        envvar="MOEDGE_MAX_TOKENS",
        show_envvar=False,
        min=1,
        help="Tokens to generate at most, unless a row says.",
    ),
]
STREAM = Annotated[
    Stream, typer.Option("--stream", help="Experts that are read: all ahead, or those wanted; auto is the fastest.")
]
HOLD = Annotated[Hold, typer.Option("--hold", help="Experts that stay in memory: those wanted most, or last.")]
TEMPERATURE = Annotated[
    float,
    typer.Option(
        "--temperature",
        envvar="MOEDGE_TEMPERATURE",
        show_envvar=False,
        min=0.0,
        help="0 takes the likeliest token, unless a row says otherwise.",
    ),
]
SEED = Annotated[
    int,
    typer.Option(
        "--seed", envvar="MOEDGE_SEED", show_envvar=False, min=0, help="Seed of rows that have none of their own."
    ),
]
TOKENS_PER_PASS = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-pass",
        envvar="MOEDGE_TOKENS_PER_PASS",
        show_envvar=False,
        min=1,
        help="Tokens of one pass over the weights at most; chosen by job and memory.",
    ),
]
MAX_SEQUENCES = Annotated[
    int | None,
    typer.Option(
        "--max-sequences",
        envvar="MOEDGE_MAX_SEQUENCES",
        show_envvar=False,
        min=1,
        help="Sequences generated together at most; chosen by job and memory.",
    ),
]
PLAN = Annotated[
    Path | None, typer.Option("--plan", help="Run what `moedge plan --save` wrote, for this model on this machine.")
]
LENIENT = Annotated[
    bool,
    typer.Option("--lenient", envvar="MOEDGE_LENIENT", show_envvar=False, help="Malformed lines become error rows."),
]
DETERMINISTIC = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        envvar="MOEDGE_DETERMINISTIC",
        show_envvar=False,
        help="A row's tokens depend on nothing but the row, on one machine: same bits in any batch.",
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
        help="Most host memory to use: 7GiB, 80%, auto. Kept as a ceiling.",
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
        help="Most GPU memory to use: 7GiB, 80%, auto, or 0 to compute on the processor.",
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
        help="Most disk that all stores may take: 60GiB, auto, or 0 for none.",
    ),
]
DISK_DIR = Annotated[
    Path | None,
    typer.Option(
        "--disk-dir",
        envvar="MOEDGE_DISK_DIR",
        show_envvar=False,
        help="Where stores of packed weights lie; the user's cache by default.",
    ),
]
UNTIL = Annotated[
    str | None,
    typer.Option(
        "--until",
        envvar="MOEDGE_UNTIL",
        show_envvar=False,
        metavar="HH:MM",
        help="Stop at this time of day; the job can be gone on with.",
    ),
]
MAX_ROWS = Annotated[int | None, typer.Option("--max-rows", min=1, help="Run so many rows now, the first unfinished.")]
MAX_FAILURES = Annotated[
    str | None,
    typer.Option(
        "--max-failures",
        envvar="MOEDGE_MAX_FAILURES",
        show_envvar=False,
        metavar="N|P%",
        help="Stop when more rows of the job than this failed.",
    ),
]
ACCEPT_DRIFT = Annotated[
    list[str] | None,
    typer.Option("--accept-drift", metavar="NAME", help="Go on though this differs from what the job was begun with."),
]
SUMMARY = Annotated[Path | None, typer.Option("--summary", help="Write the run's numbers here, as JSON.")]
PROGRESS = Annotated[
    Progress,
    typer.Option(
        "--progress",
        envvar="MOEDGE_PROGRESS",
        show_envvar=False,
        help="auto is bars on a terminal, plain lines elsewhere.",
    ),
]
FORMAT = Annotated[Format, typer.Option("--format", help="json prints events on stdout, one per line: docs/events.md.")]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


def experts(stream: Stream, hold: Hold) -> ExpertOptions:
    """How experts are streamed and held."""
    from ...moe.streaming_mode import ExpertOptions, Mode
    from ...moe.streaming_mode import Hold as Policy

    return ExpertOptions(None if stream == "auto" else Mode(stream), Policy(hold))
