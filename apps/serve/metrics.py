"""Numbers of a server in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...face import LoadedModel
from .engine_thread import EngineThread

Labels = Mapping[str, str]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(loaded: LoadedModel, engine: EngineThread, batches: Mapping[str, int], num_files: int) -> str:
    """`batches` are numbers of batches by status."""
    return "".join(_lines(loaded, engine, batches, num_files))


def _lines(loaded: LoadedModel, engine: EngineThread, batches: Mapping[str, int], num_files: int) -> Iterator[str]:
    totals, scheduler = engine.totals, loaded.engine.engine.scheduler
    yield from _metric("passes_total", "counter", "Forward passes", {"": totals.passes})
    yield from _metric("prompt_tokens_total", "counter", "Prompt tokens computed", {"": totals.prompt_tokens})
    yield from _metric("generated_tokens_total", "counter", "Tokens generated", {"": totals.generated_tokens})
    yield from _metric("requests", "gauge", "Chats and completions that run or wait", {"": engine.num_live})
    waiting = {'kind="interactive"': len(scheduler.arriving), 'kind="batch"': len(scheduler.waiting)}
    yield from _metric("waiting_sequences", "gauge", "Sequences that wait for memory", waiting)
    yield from _metric("running_sequences", "gauge", "Sequences in passes", {"": len(scheduler.running)})
    by_status = {f'status="{status}"': count for status, count in batches.items()}
    yield from _metric("batches", "gauge", "Batches by status", by_status)
    yield from _metric("files", "gauge", "Files that are kept", {"": num_files})
    tiers = loaded.engine.ledger.measure().tiers.values()
    for name in ("budget", "planned", "peak"):
        found = {f'tier="{tier.tier}"': getattr(tier, name) for tier in tiers}
        known = {label: value for label, value in found.items() if value is not None}
        yield from _metric(f"memory_{name}_bytes", "gauge", f"Memory: {name}", known)


def _metric(name: str, kind: str, about: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP moedge_{name} {about}\n# TYPE moedge_{name} {kind}\n"
    for labels, value in values.items():
        yield f"moedge_{name}{{{labels}}} {value}\n" if labels else f"moedge_{name} {value}\n"
