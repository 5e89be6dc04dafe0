"""The `RunSummary` of a job: from the counters of its engine, or merged from those of its workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import version
from typing import Any

from ...moe.streaming_mode import RouterLatency
from ...moe.streaming_order import ExpertForecast
from ..engine.engine import Metrics, quantiles
from ..loading.engine_loader import LoadedEngine, LoadedModel
from ..plan.memory_ledger import MemoryLedger
from ..plan.placement import Plan
from ..plan.planner import PlanResult
from ..shape.shards import ITEM_NBYTES
from ..source.stored_model import row_readers
from .journal.state import Counts
from .summary import (
    KV,
    Experts,
    Forecast,
    KVBytes,
    Latency,
    Memory,
    Moved,
    Passes,
    Percentiles,
    Predicted,
    Rows,
    RunSummary,
    Seconds,
    Speculation,
    Stalls,
    Throughput,
    TierMemory,
    Tokens,
    Utilisation,
    Weights,
    summarise_rows,
)


def moved(loaded: LoadedEngine) -> Moved:
    streamed, tokens = loaded.streamed, loaded.engine.metrics.generated_tokens
    disk = streamed.nbytes_from_disk
    device = streamed.nbytes_to_device if loaded.device else None
    found = Moved(disk, device)
    if device is not None and (host_kv := loaded.host_kv) is not None:
        found.kv_to_device, found.kv_to_host = host_kv.nbytes_read, host_kv.nbytes_written
        found.host_to_device = device = device + host_kv.nbytes_read
    if row_readers(loaded.model.model):
        found.rows_looked_up, found.rows_read = loaded.rows.looked_up, loaded.rows.nbytes
    if tokens:
        found.disk_per_token, found.device_per_token = disk / tokens, None if device is None else device / tokens
    return found


def stalls(loaded: LoadedEngine) -> Stalls:
    disk, link = loaded.streamed.seconds_waited
    link += loaded.host_kv.seconds_waited if loaded.host_kv else 0
    return Stalls(disk, link if loaded.device else None)


def experts(loaded: LoadedEngine, total: int) -> Experts:
    """`total` experts has the model. What is not streamed has neither hits nor misses."""
    ours = loaded.streamed.experts
    if ours.cache is not None:
        ours.cache.settle()
    found = Experts(ours.num_held, total, 0, ours.stats.union, ours.stats.unions)
    if (cache := ours.cache) is None:
        return found
    counts = cache.counts
    found.fetched, found.unwanted, found.swaps = counts.fetched, counts.unwanted, counts.swaps
    found.hit_rate = counts.hits / counts.wanted if counts.wanted else None
    found.modes = {str(mode): count for mode, count in sorted(counts.turns.items())}
    found.forecast = _forecast(cache.order.forecast, cache.order.latency)
    if host := ours.host:
        found.by_cpu, found.cpu_s = host.counts.experts, host.counts.seconds
    return found


def expert_use(loaded: LoadedEngine) -> list[list[int]] | None:
    """How many tokens chose each expert, for each layer that has experts; None for a model without any."""
    layers = loaded.streamed.experts.stats.layers.values()
    return [[round(count) for count in layer.chosen] for layer in layers if layer.tokens] or None


def _forecast(forecast: ExpertForecast, latency: RouterLatency) -> Forecast:
    counts = forecast.counts
    if not counts.issued:
        return Forecast()
    return Forecast(
        "look-ahead",
        counts.used / counts.issued,
        counts.used / counts.misses if counts.misses else None,
        (counts.issued - counts.used) * latency.nbytes,
        counts.saved * latency.seconds_each,
    )


def summarise(model: LoadedModel, planned: PlanResult, counts: Counts, seconds: Seconds) -> RunSummary:
    """The summary of a run that ended with the plan of `model.policy`."""
    source, policy, loaded = model.source, model.policy, model.engine
    plan, metrics, shape, crossed = policy.plan, loaded.engine.metrics, source.shape, moved(loaded)
    if loaded.engine.predictor is not None and loaded.engine.predictor.ended:
        plan = replace(plan, notes=(*plan.notes, loaded.engine.predictor.ended))
    return RunSummary(
        version=version("moedge"),
        command="batch",
        rows=Rows.of(counts),
        tokens=Tokens(counts.prompt_tokens, counts.generated_tokens, metrics.resumed_tokens),
        model={
            "name": source.name,
            "type": shape.model_type,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
        },
        plan=plan.as_dict() | {"key_offsets": loaded.key_offsets and loaded.key_offsets.digest},
        kernels=loaded.kernels(plan),
        seconds=seconds,
        throughput=_throughput(metrics, seconds.generate),
        predicted=_predicted(planned),
        latency=_latency(metrics),
        passes=_passes(metrics),
        speculation=_speculation(metrics),
        bytes=crossed,
        stalls=stalls(loaded),
        utilisation=_utilisation(planned, crossed.disk_to_host or 0, crossed.host_to_device or 0, seconds.generate),
        memory=_memory(loaded.ledger.measure()),
        kv=_kv(plan, loaded),
        experts=experts(loaded, shape.num_experts),
        fallbacks=policy.applied,
        weights=Weights(
            {plan.quant: loaded.shards.numel() * ITEM_NBYTES[plan.dtype]}, loaded.shards.packed_nbytes(), loaded.loss
        ),
    )


def _throughput(metrics: Metrics, seconds: float | None) -> Throughput:
    if not seconds:
        return Throughput()
    return Throughput(metrics.prompt_tokens / seconds, metrics.generated_tokens / seconds)


def _predicted(planned: PlanResult) -> Predicted:
    predicted = planned.prediction
    return Predicted(
        generate_s=predicted.seconds,
        prompt_tok_s=predicted.prompt_tok_s,
        generated_tok_s=predicted.generated_tok_s,
        passes=predicted.passes,
        sequences=predicted.sequences,
        bottleneck=predicted.bottleneck,
        disk_to_host=round(predicted.disk_nbytes),
        host_to_device=round(predicted.link_nbytes),
        peak=planned.plan.used_nbytes,
    )


def _utilisation(planned: PlanResult, from_disk: int, to_device: int, seconds: float | None) -> Utilisation:
    """The utilisation of links with a measured rate; FLOP are not counted."""
    rates = planned.request.costs.rates
    if not seconds or not rates.measured:
        return Utilisation()
    link = to_device / seconds / rates.link_bytes_s if planned.plan.staging else None
    return Utilisation(link=link, disk=from_disk / seconds / rates.disk_bytes_s)


def _latency(metrics: Metrics) -> Latency:
    return Latency(*(Percentiles(*(quantiles(each) or ())) for each in (metrics.ttft, metrics.tpot, metrics.total)))


def _passes(metrics: Metrics) -> Passes:
    if not metrics.passes:
        return Passes(count=0)
    return Passes(metrics.passes, metrics.pass_tokens / metrics.passes, metrics.pass_sequences / metrics.passes)


def _speculation(metrics: Metrics) -> Speculation:
    drafted, accepted, sampled = metrics.drafted_tokens, metrics.accepted_tokens, metrics.generated_tokens
    return Speculation(drafted, accepted, sampled / (sampled - accepted) if sampled else None)


def _memory(ledger: MemoryLedger) -> Memory:
    memory = {name: TierMemory(tier.budget, tier.peak) for name, tier in ledger.tiers.items()}
    return Memory(memory.get("device"), memory["host"])


def _kv(plan: Plan, loaded: LoadedEngine) -> KV:
    counts = loaded.engine.scheduler.counts
    used, passes = loaded.engine.metrics.kv, max(1, loaded.engine.metrics.passes)
    return KV(
        format=plan.kv,
        block=plan.kv_block,
        blocks=sum(plan.kv_blocks),
        bytes_per_token=loaded.engine.scheduler.cache.token_nbytes,
        bytes=KVBytes(
            allocated=used.allocated // passes,
            live=used.live // passes,
            waste=used.waste // passes,
            cached=used.cached // passes,
            idle=used.idle // passes,
            scales=used.scales // passes,
            shared=used.shared // passes,
        ),
        waste=loaded.engine.metrics.waste,
        prefix_hit_tokens=counts.prefix_hit_tokens,
        preemptions=counts.preemptions,
        parked=counts.parked,
        recomputed_tokens=counts.recomputed_tokens,
        cohorts=plan.host_kv.count if plan.host_kv else 0,
        moved=getattr(loaded.engine.scheduler.cache, "num_moved", 0),
        attended_by_cpu=loaded.host_kv.num_attended if loaded.host_kv else 0,
    )


def merge_summaries(summaries: Sequence[RunSummary], metrics: Metrics, counts: Counts, seconds: Seconds) -> RunSummary:
    """The summary of a job by those of its workers, whose plan and formats are the last one's. `metrics` are of all.

    Bytes, budgets, peaks, stalls and counts are sums; shares of links and rates of experts are left out.
    """
    total = replace(summarise_rows(counts), seconds=seconds)
    if not summaries:
        return total
    added: RunSummary = _added(summaries)
    total = replace(
        added,
        rows=total.rows,
        tokens=total.tokens,
        seconds=seconds,
        throughput=_throughput(metrics, seconds.generate),
        latency=_latency(metrics),
        speculation=_speculation(metrics),
        utilisation=Utilisation(),
        weights=summaries[-1].weights,
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
    counted = total.experts
    total.experts = Experts(counted.held, counted.total, counted.fetched, modes=counted.modes)
    total.experts.unwanted, total.experts.swaps = counted.unwanted, counted.swaps
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
