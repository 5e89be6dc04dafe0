"""Formats numbers for people (bytes: `gib` in offload/budget.py), and escapes untrusted text for the terminal."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`; `4.5 s` below a minute, `26 days` from two days on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:,.0f} days"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_duration(seconds: float) -> str:
    """The same without tenths, for numbers that change while they are read: `14 s`, `2:03`."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(max(60, seconds))


def speed(tokens_per_second: float) -> str:
    """`1,234 tok/s`, `11.5 tok/s`; `12 s per token` where a token takes longer than a second."""
    if 0 < tokens_per_second < 1:
        return f"{1 / tokens_per_second:,.3g} s per token"
    return f"{tokens_per_second:,.0f} tok/s" if tokens_per_second >= 100 else f"{tokens_per_second:.1f} tok/s"


def clock(seconds: float) -> str:
    """The time of day in `seconds` from now: `05:40`, with the day if it is not today."""
    now = datetime.now()
    then = now + timedelta(seconds=seconds)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b %H:%M}"


def count(number: float) -> str:
    """`1,234`, `5.3 M`, `30.5 B`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,.0f}"


def fit(text: str, width: int | None) -> str:
    """`text` wrapped at spaces for a terminal of `width` columns; as it is for None, which is no terminal.

    A longer word, such as a path, stays whole: a terminal wraps it so that it can still be copied.
    """
    lines = text.split("\n")
    if width is not None:
        lines = [
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) if len(line) > width else line
            for line in lines
        ]
    return "\n".join(lines)


def kernel_lines(lacks: Mapping[str, str], notes: Iterable[str]) -> Iterator[str]:
    """Says which GPU kernels torch replaces under a plan and why, and adds the notes."""
    yield from notes
    for family, reason in lacks.items():
        yield f"torch computes instead of the GPU kernels for {family}. {reason}"


# C0 and C1 controls drive the terminal, bidirectional controls reorder what is read, surrogates cannot be written.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""`text` with every character that could control a terminal escaped (`\x1b`, `\u202e`); \n and \t stay."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def loss_line(loss: Mapping[str, float], more_bits: int = 0) -> str:
    """The relative errors, by group of tensors, of quantized weights that were packed again; empty where none were.

    `more_bits` are those of the checkpoint's codes where they are more than was packed, else 0.
    """
    if not loss:
        return ""
    parts = [f"{group} {100 * each:.2g} %" for group, each in loss.items()]
    why = f"; the files have {more_bits} bits a weight, and --quant int8 would lose less" if more_bits else ""
    return f"weights were packed again; relative L2 error against the checkpoint: {', '.join(parts)}{why}"


def formats_line(plan: Mapping[str, Any]) -> str:
    """The formats of a plan as JSON."""
    activations = ", activations int8" if plan["compute"] == "int8" else ""
    return f"weights {plan['quant']}{activations}, KV cache {plan['kv']}, dtype {plan['dtype']}"
