"""How fast a model generates here, by the number of sequences: measured on random prompts, beside what was planned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from ...moe.streaming_mode import Mode
from ...offload.memory import Heap
from ..engine import sequence
from ..jobs.job_plan import equal_rows, with_workload
from ..jobs.journal.state import Counts
from ..jobs.lifecycle import OpenModel, refuse_over_budget
from ..jobs.report import summarise
from ..jobs.stop import DeferredInterrupt
from ..jobs.summary import Seconds
from ..loading.engine_loader import LoadedModel
from ..sampling.params import SequenceSampling
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import Budgets, Settings
from ..settings.stages import stage

SCHEMA = "moedge.bench/1"


@dataclass(frozen=True, slots=True)
class Load:
    """Numbers of sequences that run together, one number after the other, and the tokens of each sequence."""

    sequences: Sequence[int] = (1, 8, 32)
    prompt_tokens: int = 128
    max_tokens: int = 64
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_tokens


def bench(model: str, settings: Settings, budgets: Budgets, stream: Mode | None, load: Load) -> dict[str, Any]:
    """The document of `moedge bench --json` (docs/dev/bench.md). The engine is the one that `moedge batch` would load
    for the most of `load.sequences` rows.

    Raises SettingError for a load that is longer than the context, DoesNotFit, and OverBudget, whose `result` is the
    document.
    """
    with OpenModel(model) as opened:
        if load.longest > (context := opened.source.shape.context):
            raise SettingError(
                f"--prompt-tokens {load.prompt_tokens:,} and --max-tokens {load.max_tokens:,} are {load.longest:,}, "
                f"and the context has {context:,}; lower one of them"
            )
        most = equal_rows(max(load.sequences), load.prompt_tokens, load.max_tokens)
        loaded = opened.load(settings, budgets, most, stream)
        if loaded.longest < load.longest:
            raise DoesNotFit(
                f"sequences of {loaded.longest:,} tokens fit, and {load.longest:,} were asked for; give more memory, "
                "or lower --prompt-tokens"
            )
        heap = opened.rehearse(loaded, most)
        fitting = [count for count in load.sequences if count <= loaded.policy.plan.max_sequences]
        points = [_point(loaded, load, count, heap) for count in fitting or [loaded.policy.plan.max_sequences]]
        request, ledger = loaded.chosen.request, loaded.engine.ledger.measure()
        rates, hardware = request.costs.rates, request.hardware
        device = loaded.policy.plan.staging is not None
        document = {
            "schema": SCHEMA,
            "version": version("moedge"),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": {"name": loaded.source.name, "type": loaded.source.shape.model_type},
            "machine": {
                "hardware": None if hardware is None else asdict(hardware),
                "measured": rates.measured,
                "disk_bytes_s": rates.disk_bytes_s if rates.measured else None,
                "link_bytes_s": rates.link_bytes_s if rates.measured and device else None,
            },
            "load": asdict(load),
            "plan": loaded.policy.plan.as_dict(),
            "memory": {name: {"budget": tier.budget, "peak": tier.peak} for name, tier in ledger.tiers.items()},
            "points": points,
        }
        refuse_over_budget(loaded.engine.ledger.measure().over_budget, document)
        return document


def _point(loaded: LoadedModel, load: Load, count: int, heap: Heap) -> dict[str, Any]:
    """The measurements of one number of sequences."""
    with stage(f"generating with {count:,} of {max(load.sequences):,} sequences"):
        counts, seconds = _run(loaded, load, count, heap)
    workload = equal_rows(count, load.prompt_tokens, load.max_tokens)
    planned = with_workload(loaded.chosen, loaded.policy.plan, workload)
    summary = summarise(loaded, planned, counts, Seconds(load=0.0, generate=seconds, total=seconds)).as_dict()
    measured = planned.request.costs.rates.measured
    # What the products, attention and overheads of these passes take at the rates of the machine.
    computing = planned.prediction.busy_s["compute"] / planned.correction / seconds if measured else None
    shown = ("throughput", "latency", "passes", "bytes", "stalls", "predicted")
    return {
        "sequences": count,
        "failed": counts.failed,
        "seconds": seconds,
        "utilisation": summary["utilisation"] | {"compute": computing},
        "tokens": {name: summary["tokens"][name] for name in ("prompt", "generated")},
        **{name: summary[name] for name in shown},
    }


def _run(loaded: LoadedModel, load: Load, count: int, heap: Heap) -> tuple[Counts, float]:
    """What the sequences gave, and the seconds that they took."""
    loaded.engine.start_counting()
    engine, failed = loaded.engine.engine, 0
    prompts = list(_prompts(loaded, load, count))
    begun = time.perf_counter()
    for prompt in prompts:
        engine.add(sequence.Sequence(prompt, SequenceSampling(load.max_tokens, ignore_eos=True)))
    while engine.busy:
        with DeferredInterrupt():
            failed += sum(bool(each.error) for each in engine.step())
        heap.after_pass()
    seconds = time.perf_counter() - begun
    metrics = engine.metrics
    return Counts(count - failed, failed, metrics.prompt_tokens, metrics.generated_tokens), seconds


def _prompts(loaded: LoadedModel, load: Load, count: int) -> Iterator[list[int]]:
    """Random token ids, others for every number of sequences: nothing comes from the prefix cache."""
    generator = torch.Generator().manual_seed(load.seed * 1_000_003 + count)
    for _ in range(count):
        yield torch.randint(loaded.source.shape.vocab, (load.prompt_tokens,), generator=generator).tolist()
