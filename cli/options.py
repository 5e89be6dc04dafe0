"""Options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint folder, a prepared store, or a hub id like Qwen/Qwen3-30B-A3B."),
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


class Progress(StrEnum):
    AUTO, BAR, PLAIN, NONE = "auto", "bar", "plain", "none"


class Format(StrEnum):
    HUMAN, JSON = "human", "json"


DTYPE = Annotated[DType, typer.Option("--dtype", help="Precision of the arithmetic; auto is the checkpoint's own.")]
QUANT = Annotated[Quant, typer.Option("--quant", help="Weights in memory; auto is the least lossy format that fits.")]
COMPUTE = Annotated[
    Arithmetic,
    typer.Option("--compute", help="int8 rounds activations, too: faster prompts on many CPUs, with weights in int8."),
]
KV_FORMAT = Annotated[
    KV,
    typer.Option(
        "--kv", help="Format of the KV cache (keys/values); auto is the arithmetic's own where all fits, else int8."
    ),
]
ATTENTION = Annotated[
    Attention, typer.Option("--attention", help="What computes attention; auto is the fastest that can.")
]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most, unless a row says.")]
TEMPERATURE = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token, unless a row says otherwise.")
]
SEED = Annotated[int, typer.Option("--seed", min=0, help="Seed of rows that have none of their own.")]
DETERMINISTIC = Annotated[
    bool,
    typer.Option("--deterministic", help="A row's tokens depend on nothing but the row: same bits in any batch."),
]
RAM = Annotated[
    str, typer.Option("--ram", metavar="SIZE", help="Most host memory to use: 7GiB, 80%, auto. Kept as a ceiling.")
]
GPU_MEM = Annotated[
    str,
    typer.Option(
        "--gpu-mem", metavar="SIZE", help="Most GPU memory to use: 7GiB, 80%, auto, or 0 to compute on the processor."
    ),
]
DISK = Annotated[
    str, typer.Option("--disk", metavar="SIZE", help="Most disk that all stores may take: 60GiB, auto, or 0 for none.")
]
DISK_DIR = Annotated[
    Path | None, typer.Option("--disk-dir", help="Where stores of packed weights lie; the user's cache by default.")
]
UNTIL = Annotated[
    str | None, typer.Option("--until", metavar="HH:MM", help="Stop at this time of day; the job can be gone on with.")
]
MAX_ROWS = Annotated[int | None, typer.Option("--max-rows", min=1, help="Run so many rows now, the first unfinished.")]
MAX_FAILURES = Annotated[
    str | None, typer.Option("--max-failures", metavar="N|P%", help="Stop when more rows of the job than this failed.")
]
ACCEPT_DRIFT = Annotated[
    list[str] | None,
    typer.Option("--accept-drift", metavar="NAME", help="Go on though this differs from what the job was begun with."),
]
SUMMARY = Annotated[Path | None, typer.Option("--summary", help="Write the run's numbers here, as JSON.")]
PROGRESS = Annotated[Progress, typer.Option("--progress", help="auto is bars on a terminal, plain lines elsewhere.")]
FORMAT = Annotated[Format, typer.Option("--format", help="json prints events on stdout, one per line: docs/events.md.")]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
