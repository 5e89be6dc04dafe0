"""The server's numbers in the text format of Prometheus."""

from collections.abc import Iterator, Mapping

from ...face import LoadedModel
from .counts import Histogram, ServerCounts
from .engine_thread import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ABOUT = {
    "request_duration": "From a request to its whole answer",
    "time_to_first_token": "From a request to the first token of its answer",
    "time_per_output_token": "Between two tokens of an answer, its mean",
}


def metrics_text(loaded: LoadedModel, engine: EngineThread, batches: Mapping[str, int], num_files: int) -> str:
    """`batches` are numbers of batches by status."""
    with engine.counts.lock:
        counted = list(_counts(engine.counts))
    return "".join((*_state(loaded, engine, batches, num_files), *counted))


def _state(loaded: LoadedModel, engine: EngineThread, batches: Mapping[str, int], num_files: int) -> Iterator[str]:
    totals, scheduler = engine.totals, loaded.engine.engine.scheduler
    yield from _metric("passes_total", "counter", "Forward passes", {"": totals.passes})
    yield from _metric("prompt_tokens_total", "counter", "Prompt tokens computed", {"": totals.prompt_tokens})
    yield from _metric("generated_tokens_total", "counter", "Tokens generated", {"": totals.generated_tokens})
    yield from _metric("requests", "gauge", "Requests for an answer that run or wait", {"": engine.num_live})
    waiting = {'kind="interactive"': len(scheduler.urgent), 'kind="batch"': len(scheduler.waiting)}
    yield from _metric("waiting_sequences", "gauge", "Sequences that wait for memory", waiting)
    yield from _metric("running_sequences", "gauge", "Sequences in passes", {"": len(scheduler.running)})
    yield from _metric("batches", "gauge", "Batches by status", _labelled("status", batches))
    yield from _metric("files", "gauge", "Files that are kept", {"": num_files})
    tiers = loaded.engine.ledger.measure().tiers.values()
    for name in ("budget", "planned", "peak"):
        found = {f'tier="{tier.tier}"': getattr(tier, name) for tier in tiers}
        known = {label: value for label, value in found.items() if value is not None}
        yield from _metric(f"memory_{name}_bytes", "gauge", f"Memory: {name}", known)


def _counts(counts: ServerCounts) -> Iterator[str]:
    yield from _metric("rows_total", "counter", "Rows of batches", _labelled("outcome", counts.rows))
    codes = _labelled("code", counts.row_errors)
    yield from _metric("row_errors_total", "counter", "Rows of batches that failed, by error", codes)
    codes = _labelled("code", counts.request_errors)
    yield from _metric("request_errors_total", "counter", "Requests that got an error", codes)
    for name, by_endpoint in counts.seconds.items():
        yield from _head(f"{name}_seconds", "histogram", _ABOUT[name])
        for endpoint, histogram in sorted(by_endpoint.items()):
            yield from _histogram(f"{name}_seconds", f'endpoint="{endpoint}"', histogram)


def _labelled(label: str, values: Mapping[str, int]) -> dict[str, int]:
    return {f'{label}="{name}"': value for name, value in sorted(values.items())}


def _metric(name: str, kind: str, about: str, values: Mapping[str, int]) -> Iterator[str]:
    yield from _head(name, kind, about)
    for labels, value in values.items():
        yield f"moedge_{name}{{{labels}}} {value}\n" if labels else f"moedge_{name} {value}\n"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    count = 0
    for end, count in histogram.cumulative():
        yield f'moedge_{name}_bucket{{{labels},le="{end}"}} {count}\n'
    yield f"moedge_{name}_sum{{{labels}}} {histogram.sum}\nmoedge_{name}_count{{{labels}}} {count}\n"


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP moedge_{name} {about}\n# TYPE moedge_{name} {kind}\n"
