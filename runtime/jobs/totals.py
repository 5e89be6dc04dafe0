"""The numbers of a job that ran on several workers: what adds up is added, what does not is null."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..engine.engine import Metrics, quantiles
from .journal.state import Counts
from .summary import (
    Experts,
    Latency,
    Percentiles,
    Predicted,
    RunSummary,
    Seconds,
    Throughput,
    Utilisation,
    summarise_rows,
)


def merge_summaries(summaries: Sequence[RunSummary], metrics: Metrics, counts: Counts, seconds: Seconds) -> RunSummary:
    """The summary of a job by those of its workers, whose plan and formats are the last one's. `metrics` are of all.

    Bytes, budgets, peaks, stalls and counts are sums; shares of links and rates of experts are left out.
    """
    total = replace(summarise_rows(counts), seconds=seconds)
    if not summaries:
        return total
    added: RunSummary = _added(summaries)
    total = replace(added, rows=total.rows, tokens=total.tokens, seconds=seconds, throughput=Throughput())
    if took := seconds.generate:
        total.throughput = Throughput(metrics.prompt_tokens / took, metrics.generated_tokens / took)
    total.latency = Latency(
        *(Percentiles(*(quantiles(each) or ())) for each in (metrics.ttft, metrics.tpot, metrics.total))
    )
    if metrics.passes:
        total.passes.tokens_mean = metrics.pass_tokens / metrics.passes
        total.passes.sequences_mean = metrics.pass_sequences / metrics.passes
    moved, tokens = total.bytes, metrics.generated_tokens
    per_token = [
        None if each is None or not tokens else each / tokens for each in (moved.disk_to_host, moved.host_to_device)
    ]
    moved.disk_per_token, moved.device_per_token = per_token
    last = summaries[-1]
    total.kv = replace(total.kv, block=last.kv.block, bytes_per_token=last.kv.bytes_per_token, waste=metrics.waste)
    total.utilisation = Utilisation()
    counted = total.experts
    total.experts = Experts(counted.held, counted.total, counted.fetched, modes=counted.modes)
    total.experts.unwanted, total.experts.swaps = counted.unwanted, counted.swaps
    total.weights = last.weights
    rates = [each.predicted.generated_tok_s for each in summaries if each.predicted.generated_tok_s]
    total.predicted = Predicted(generated_tok_s=sum(rates) if rates else None, bottleneck=last.predicted.bottleneck)
    return total


def _added(values: Sequence[Any]) -> Any:
    """The sum of values of one kind; of texts and lists, the first."""
    found = [each for each in values if each is not None]
    if not found:
        return None
    first = found[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return replace(first, **{name: _added([getattr(each, name) for each in found]) for name in names})
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(found)
    if isinstance(first, Mapping) and all(type(each) in (int, float) for each in first.values()):
        total: Counter[str] = Counter()
        for each in found:
            total.update(each)
        return dict(total)
    return first
