"""What a run did, in numbers: the dataclasses of `--summary FILE`, which run.schema.json describes.

Knows no clock and no engine. A key that nobody measured is null; no key is ever absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...offload.atomic_file import own_name, write_atomically
from ..plan.fallback import Fallback

SCHEMA = "moedge.run/5"


@dataclass(slots=True)
class Rows:
    total: int
    ok: int
    failed: int


@dataclass(slots=True)
class Tokens:
    prompt: int
    generated: int


@dataclass(slots=True)
class Seconds:
    load: float | None = None
    generate: float | None = None
    total: float | None = None


@dataclass(slots=True)
class Throughput:
    prompt_tok_s: float | None = None
    generated_tok_s: float | None = None


@dataclass(slots=True)
class Predicted:
    """What the plan promised before the first pass, in the units of what was measured."""

    generate_s: float | None = None
    prompt_tok_s: float | None = None
    generated_tok_s: float | None = None
    passes: float | None = None
    sequences: float | None = None
    bottleneck: str | None = None
    disk_to_host: int | None = None
    host_to_device: int | None = None
    peak: int | None = None


@dataclass(slots=True)
class Percentiles:
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(slots=True)
class Latency:
    """Seconds per sequence: to its first token, per token after that, and in all."""

    ttft_s: Percentiles = field(default_factory=Percentiles)
    tpot_s: Percentiles = field(default_factory=Percentiles)
    total_s: Percentiles = field(default_factory=Percentiles)


@dataclass(slots=True)
class Passes:
    count: int | None = None
    tokens_mean: float | None = None
    sequences_mean: float | None = None


@dataclass(slots=True)
class Moved:
    """Bytes that crossed each link; per token that was generated, prompts' share included."""

    disk_to_host: int | None = None
    host_to_device: int | None = None
    disk_per_token: float | None = None
    device_per_token: float | None = None


@dataclass(slots=True)
class Stalls:
    """Seconds that compute waited for bytes, by the link that they came over last."""

    disk: float | None = None
    link: float | None = None


@dataclass(slots=True)
class Utilisation:
    """Shares, 0 to 1, of what the machine was measured to do at best."""

    compute: float | None = None
    link: float | None = None
    disk: float | None = None


@dataclass(slots=True)
class TierMemory:
    """Bytes granted and bytes seen at most."""

    budget: int | None = None
    peak: int | None = None


@dataclass(slots=True)
class Memory:
    """`device` is None on a machine without one."""

    device: TierMemory | None = None
    host: TierMemory = field(default_factory=TierMemory)
    disk: TierMemory = field(default_factory=TierMemory)


@dataclass(slots=True)
class KVBytes:
    """Means over passes; the four after `allocated` add up to it. `scales` are part of `live`; `shared` was saved."""

    allocated: int | None = None
    live: int | None = None
    waste: int | None = None
    cached: int | None = None
    idle: int | None = None
    scales: int | None = None
    shared: int | None = None


@dataclass(slots=True)
class KV:
    format: str | None = None
    block: int | None = None
    blocks: int | None = None
    bytes_per_token: float | None = None
    bytes: KVBytes = field(default_factory=KVBytes)
    waste: float | None = None
    prefix_hit_tokens: int | None = None
    preemptions: int | None = None
    parked: int | None = None
    recomputed_tokens: int | None = None


@dataclass(slots=True)
class Forecast:
    """Experts read before their router had spoken: `precision` of them were wanted, `recall` of what was missing."""

    by: str | None = None
    precision: float | None = None
    recall: float | None = None
    wasted_bytes: int | None = None
    saved_s: float | None = None


@dataclass(slots=True)
class Experts:
    """`union_by_layer` is by layer with experts; `modes` counts layers of passes by how they were streamed."""

    held: int | None = None
    total: int | None = None
    fetched: int | None = None
    union: float | None = None
    union_by_layer: Sequence[float] | None = None
    hit_rate: float | None = None
    unwanted: int | None = None
    swaps: int | None = None
    modes: Mapping[str, int] | None = None
    forecast: Forecast = field(default_factory=Forecast)


@dataclass(slots=True)
class Weights:
    """Bytes by format: what the settings asked for, and what really became packed."""

    requested: Mapping[str, int] | None = None
    packed: Mapping[str, int] | None = None


@dataclass(slots=True)
class RunSummary:
    version: str
    rows: Rows
    tokens: Tokens
    command: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=Seconds)
    throughput: Throughput = field(default_factory=Throughput)
    predicted: Predicted = field(default_factory=Predicted)
    latency: Latency = field(default_factory=Latency)
    passes: Passes = field(default_factory=Passes)
    bytes: Moved = field(default_factory=Moved)
    stalls: Stalls = field(default_factory=Stalls)
    utilisation: Utilisation = field(default_factory=Utilisation)
    memory: Memory = field(default_factory=Memory)
    kv: KV = field(default_factory=KV)
    experts: Experts = field(default_factory=Experts)
    weights: Weights = field(default_factory=Weights)
    fallbacks: list[Fallback] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | asdict(self)

    def write(self, path: Path) -> None:
        """Replaces what is there; NaN and infinities are refused with `ValueError`."""
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False)
        write_atomically(path, text.encode() + b"\n", own_name(path))
