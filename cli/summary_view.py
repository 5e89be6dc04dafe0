"""A run's summary as a small table."""

from __future__ import annotations

from rich.table import Table

from ..runtime.jobs.summary import Percentiles, RunSummary
from .wording import duration, gib, kernel_lines


def summary_table(summary: RunSummary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, text in _lines(summary):
        table.add_row(label, text, style=None)
    return table


def _lines(summary: RunSummary) -> list[tuple[str, str]]:
    rows, tokens, speed = summary.rows, summary.tokens, summary.throughput
    host, kv, latency = summary.memory.host, summary.kv, summary.latency
    return [
        ("rows", f"{rows.ok:,} answered, {rows.failed:,} failed"),
        ("tokens", f"{tokens.generated:,} generated, {tokens.prompt:,} prompt"),
        ("speed", f"{speed.generated_tok_s or 0:,.1f} tok/s out, {speed.prompt_tok_s or 0:,.1f} in"),
        ("time", f"{duration(summary.seconds.total or 0)}, of which loading {duration(summary.seconds.load or 0)}"),
        ("first token", _spread(latency.ttft_s)),
        ("per token", _spread(latency.tpot_s)),
        ("passes", f"{summary.passes.count:,} of {summary.passes.sequences_mean or 0:,.1f} sequences"),
        ("memory", f"peak {gib(host.peak or 0)} of {gib(host.budget or 0)}"),
        *_device(summary),
        ("disk", f"{gib(summary.bytes.disk_to_host or 0)} read while generating"),
        ("KV cache", f"{kv.format}, {kv.blocks:,} blocks of {kv.block} tokens, {kv.waste or 0:.1%} wasted"),
        ("reuse", f"{kv.prefix_hit_tokens or 0:,} prompt tokens were in the cache; {kv.preemptions} preemptions"),
        ("weights", ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in (summary.weights.packed or {}).items())),
        *(("kernels", line) for line in kernel_lines(summary.plan.get("lacks", {}), summary.plan.get("notes", ()))),
    ]


def _device(summary: RunSummary) -> list[tuple[str, str]]:
    device, copied = summary.memory.device, summary.bytes.host_to_device
    if device is None:
        return []
    return [
        ("GPU memory", f"peak {gib(device.peak or 0)} of {gib(device.budget or 0)}"),
        ("link", f"{gib(copied or 0)} copied to the GPU while generating"),
    ]


def _spread(values: Percentiles) -> str:
    if values.p50 is None or values.p99 is None:
        return "no row was answered"
    return f"{values.p50:.3f} s median, {values.p99:.3f} s for the slowest in a hundred"
