"""The numbers of a run: the dataclasses of `--summary FILE`; `json_schema` generates their schema.

Knows no clock and no engine. A value that was not measured is null; no key is ever absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Ge, Le

from ...offload.atomic_file import own_name, write_atomically
from ..plan.fallback import Fallback
from ..plan.kernels import Kernels
from ..plan.prediction import Resource
from .journal.state import Counts

SCHEMA = "moedge.run/10"

Count = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(slots=True)
class Rows:
    """`cut` rows are answers or errors that max_tokens ended. `finish_reasons` counts the choices of answered rows,
    `errors` the failed rows by code.
    """

    total: Count
    ok: Count
    failed: Count
    cut: Count = 0
    finish_reasons: Mapping[str, Count] = field(default_factory=dict)
    errors: Mapping[str, Count] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Counts) -> Self:
        """Reasons and codes with the most frequent first."""
        reasons, codes = (dict(each.most_common()) for each in (counts.finish_reasons, counts.codes))
        return cls(counts.rows, counts.ok, counts.failed, counts.cut, reasons, codes)


@dataclass(slots=True)
class Tokens:
    """`resumed` were computed once more: prompts of rows that an earlier run began, and what it had generated."""

    prompt: Count
    generated: Count
    resumed: Count = 0


@dataclass(slots=True)
class Seconds:
    """`start` is what comes before loading: imports, tokens that are counted, the plan."""

    start: Amount | None = None
    load: Amount | None = None
    generate: Amount | None = None
    total: Amount | None = None


@dataclass(slots=True)
class Throughput:
    prompt_tok_s: Amount | None = None
    generated_tok_s: Amount | None = None


@dataclass(slots=True)
class Predicted:
    """The estimate of the plan before the first pass, in the units of the measurements."""

    generate_s: Amount | None = None
    prompt_tok_s: Amount | None = None
    generated_tok_s: Amount | None = None
    passes: Amount | None = None
    sequences: Amount | None = None
    bottleneck: Resource | None = None
    disk_to_host: Count | None = None
    host_to_device: Count | None = None
    peak: Count | None = None


@dataclass(slots=True)
class Percentiles:
    p50: Amount | None = None
    p95: Amount | None = None
    p99: Amount | None = None


@dataclass(slots=True)
class Latency:
    """Seconds per sequence: to its first token, per token after that, and in all."""

    ttft_s: Percentiles = field(default_factory=Percentiles)
    tpot_s: Percentiles = field(default_factory=Percentiles)
    total_s: Percentiles = field(default_factory=Percentiles)


@dataclass(slots=True)
class Passes:
    count: Count | None = None
    tokens_mean: Amount | None = None
    sequences_mean: Amount | None = None


@dataclass(slots=True)
class Speculation:
    """Tokens that passes drafted, and those of them that were the next ones. `tokens_per_sequence_and_pass` is 1 where
    none were."""

    drafted_tokens: Count | None = None
    accepted_tokens: Count | None = None
    tokens_per_sequence_and_pass: Amount | None = None


@dataclass(slots=True)
class Moved:
    """Bytes that crossed each link while generating; per token that was generated, prompts' share included.

    `written` went to disk as prepared weights before the first pass. Of embeddings and tables on the disk, rows of
    `rows_looked_up` bytes were wanted, and blocks of `rows_read` bytes were read for them, beside `disk_to_host`. Keys
    and values in host memory are part of `host_to_device`; new ones went down.
    """

    disk_to_host: Count | None = None
    host_to_device: Count | None = None
    disk_per_token: Amount | None = None
    device_per_token: Amount | None = None
    rows_looked_up: Count | None = None
    rows_read: Count | None = None
    written: Count | None = None
    kv_to_device: Count | None = None
    kv_to_host: Count | None = None


@dataclass(slots=True)
class Stalls:
    """Seconds that compute waited for bytes, by the link that they came over last, and for `rows` to be there."""

    disk: Amount | None = None
    link: Amount | None = None
    rows: Amount | None = None


@dataclass(slots=True)
class Utilisation:
    """Shares, 0 to 1, of what the machine was measured to do at best."""

    compute: Share | None = None
    link: Share | None = None
    disk: Share | None = None


@dataclass(slots=True)
class TierMemory:
    """Budget and measured peak, in bytes."""

    budget: Count | None = None
    peak: Count | None = None


@dataclass(slots=True)
class Memory:
    """`device` is None on a machine without one."""

    device: TierMemory | None = None
    host: TierMemory = field(default_factory=TierMemory)
    disk: TierMemory = field(default_factory=TierMemory)


@dataclass(slots=True)
class KVBytes:
    """Means over passes; the four after `allocated` add up to it. `scales` are part of `live`; `shared` was saved."""

    allocated: Count | None = None
    live: Count | None = None
    waste: Count | None = None
    cached: Count | None = None
    idle: Count | None = None
    scales: Count | None = None
    shared: Count | None = None


@dataclass(slots=True)
class KV:
    """`attended_by_cpu` counts generated tokens and layers in which the CPU attended to sequences in host memory."""

    format: str | None = None
    block: Count | None = None
    blocks: Count | None = None
    bytes_per_token: Amount | None = None
    bytes: KVBytes = field(default_factory=KVBytes)
    waste: Share | None = None
    prefix_hit_tokens: Count | None = None
    preemptions: Count | None = None
    parked: Count | None = None
    recomputed_tokens: Count | None = None
    cohorts: Count | None = None
    moved: Count | None = None
    attended_by_cpu: Count | None = None


@dataclass(slots=True)
class Forecast:
    """Prefetches of experts: `precision` is the share of them that was used, `recall` that of needed experts."""

    by: str | None = None
    precision: Share | None = None
    recall: Share | None = None
    wasted_bytes: Count | None = None
    saved_s: float | None = None


@dataclass(slots=True)
class Experts:
    """`union_by_layer` is by layer with experts; `modes` counts layers of passes by how they were streamed. Beside a
    GPU the CPU computed experts `by_cpu` times, in `cpu_s` seconds, and these did not cross the link."""

    held: Count | None = None
    total: Count | None = None
    fetched: Count | None = None
    union: Share | None = None
    union_by_layer: Sequence[Share] | None = None
    hit_rate: Share | None = None
    unwanted: Count | None = None
    swaps: Count | None = None
    modes: Mapping[str, Count] | None = None
    by_cpu: Count | None = None
    cpu_s: Amount | None = None
    forecast: Forecast = field(default_factory=Forecast)


@dataclass(slots=True)
class Weights:
    """Bytes by format, as requested by the settings, and as actually quantized; what packing again lost, by group."""

    requested: Mapping[str, Count] | None = None
    packed: Mapping[str, Count] | None = None
    loss: Mapping[str, float] | None = None


@dataclass(slots=True)
class WorkerRun:
    """What one worker of a cluster did for the job: rows whose answer counted, and tokens, counted or not."""

    name: str
    rows: Count = 0
    generated_tokens: Count = 0


@dataclass(slots=True)
class RunSummary:
    version: str
    rows: Rows
    tokens: Tokens
    command: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    kernels: Kernels | None = None
    seconds: Seconds = field(default_factory=Seconds)
    throughput: Throughput = field(default_factory=Throughput)
    predicted: Predicted = field(default_factory=Predicted)
    latency: Latency = field(default_factory=Latency)
    passes: Passes = field(default_factory=Passes)
    speculation: Speculation = field(default_factory=Speculation)
    bytes: Moved = field(default_factory=Moved)
    stalls: Stalls = field(default_factory=Stalls)
    utilisation: Utilisation = field(default_factory=Utilisation)
    memory: Memory = field(default_factory=Memory)
    kv: KV = field(default_factory=KV)
    experts: Experts = field(default_factory=Experts)
    weights: Weights = field(default_factory=Weights)
    fallbacks: list[Fallback] = field(default_factory=list)
    workers: list[WorkerRun] = field(default_factory=list)

    def without_memory(self) -> Self:
        """Of a worker that died: another one has the memory meanwhile."""
        experts = replace(self.experts, held=None, total=None)
        return replace(self, memory=Memory(), kv=KV(), experts=experts, predicted=Predicted())

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | asdict(self)

    def write(self, path: Path) -> None:
        """Replaces what is there; NaN and infinities are refused with `ValueError`."""
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False)
        write_atomically(path, text.encode() + b"\n", own_name(path))


def summarise_rows(counts: Counts) -> RunSummary:
    """The summary of a job that was already finished: without measurements."""
    return RunSummary(
        version=version("moedge"),
        command="batch",
        rows=Rows.of(counts),
        tokens=Tokens(counts.prompt_tokens, counts.generated_tokens),
    )


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of `RunSummary.as_dict`: requires every key and allows no other."""
    from pydantic import TypeAdapter

    found = TypeAdapter(RunSummary).json_schema()
    found["properties"]["schema"] = {"const": SCHEMA}
    for each in (found, *found["$defs"].values()):
        each |= {"required": list(each["properties"]), "additionalProperties": False}
        for value in each["properties"].values():
            value.pop("default", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:{SCHEMA}", **found}


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=1))
