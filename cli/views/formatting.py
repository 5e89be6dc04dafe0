"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta


def gib(nbytes: float) -> str:
    """`12.34 GiB`; `5 MiB` where that would be all zeros."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`; `4.5 s` below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clock(seconds: float) -> str:
    """What clocks show in so many seconds: `05:40`, with the day where it is not today's."""
    now = datetime.now()
    then = now + timedelta(seconds=seconds)
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b %H:%M}"


def count(number: float) -> str:
    """`1,234`, `5.3 M`, `30.5 B`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,.0f}"


def kernel_lines(lacks: Mapping[str, str], notes: Iterable[str]) -> Iterator[str]:
    """Of a plan: why torch computes what kernels of the GPU should, and what else is worth knowing."""
    yield from notes
    for family, reason in lacks.items():
        yield f"torch computes in place of the GPU's kernels for {family}. {reason}"
