"""Random trials of `--deterministic`: a job in two ways that must not show in a bit, and what happened on each.

A trial is drawn from its seed: precision (dtype, weights, cache, arithmetic), then passes, memory, blocks, threads and
the rows beside a row. Whatever is drawn, tokens and log-probabilities are those of the plain way: all weights in memory
without a store, every row in one large pass.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moedge.moe.streaming_mode import Mode
from moedge.quant.kv.format import KV_FORMATS
from moedge.quant.matmul.thread_pool import torch_threads
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan, reads_integers
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.families import LATENT
from moedge.runtime.shape.shards import FORMATS
from moedge.runtime.source.model_source import ModelSource
from support.tiny_families import FEATURES

RECURRENT = (
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "lfm3", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text",
)  # fmt: skip
# Those of models that also see, and of late 2026.
LATE = (
    "apertus1p5_text", "cohere_compass_text", "deepseek_ocr2_text", "diffllama", "ernie4_5_vl_moe_text",
    "glm4v_moe_text", "glm4v_text", "glm_ocr_text",
    "granite4_vision_text", "granite_docling_text", "lara_mini", "muse_glimmer_text", "muse_spark_text",
    "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_omni_moe_text",
    "qwen3_vl_moe_text", "qwen3_vl_text", "sarvam_moe", "step3p5",
)  # fmt: skip
FAMILIES = tuple(sorted({*FEATURES, *LATENT, *RECURRENT, *LATE}))
SHARED, NEW_TOKENS, SAMPLES = 50, 10, 3
# What follows the shared beginning; negative lengths are rows of their own.
TAILS = (5, 33, 1, -30, 12, -3, 20, -90)
LONGEST = SHARED + max(TAILS) + NEW_TOKENS
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    {"temperature": 0.7, "min_p": 0.05, "prompt_logprobs": 2},
)
BUDGETS = ("in memory", "whole", "half", "least")

# By prompt and sample: tokens, their log-probabilities, and the prompt's.
Answers = dict[tuple[int, int], tuple[Any, ...]]


@dataclass(frozen=True)
class Precision:
    dtype: str
    quant: str
    kv: str
    compute: str

    @classmethod
    def draw(cls, random: random.Random) -> Precision:
        dtype, quant = random.choice(("bf16", "bf16", "fp32", "fp16")), random.choice(FORMATS)
        kv = random.choice([dtype, *(name for name in KV_FORMATS if "int" in name)])
        return cls(dtype, quant, kv, random.choice(("float", "int8")) if reads_integers(quant, dtype) else "float")

    def settings(self, tokens: int = 1024, sequences: int = 32) -> Settings:
        return Settings(
            dtype=self.dtype, quant=self.quant, kv=self.kv, compute=self.compute, deterministic=True,
            tokens_per_pass=tokens, max_sequences=sequences,
        )  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a job is run. `budget` "in memory" has no store; `spare` is how much of the pool is left beside the smallest,
    None for ample; `kept` are the prompts that run, in this order."""

    tokens: int = 1024
    sequences: int = 32
    budget: str = "in memory"
    mode: Mode | None = None
    block: int = 32
    spare: float | None = None
    parked: bool = False
    sharing: bool = True
    forked: bool = False
    threads: int = 1
    kept: tuple[int, ...] = tuple(range(len(TAILS)))

    @classmethod
    def draw(cls, random: random.Random) -> Way:
        kept = random.sample(range(len(TAILS)), random.choice((len(TAILS), len(TAILS), 5)))
        tight = random.random() < 0.5
        return cls(
            tokens=random.choice((16, 33, 64, 200, 1024)),
            sequences=random.choice((8, 32) if tight else (1, 3, 8, 32)),
            budget=random.choice(BUDGETS),
            mode=random.choice((None, *Mode)),
            block=16 if tight else random.choice((16, 32, 64)),
            spare=random.choice((0.0, 0.05)) if tight else None,
            parked=tight and random.random() < 0.5,
            sharing=random.random() < 0.7,
            # Samples of a prompt that go on from shared blocks are what a tight pool runs out by.
            forked=random.random() < (0.9 if tight else 0.5),
            threads=random.choice((1, 2, 3)),
            kept=tuple(kept),
        )


def drawn(family: str, variation: int) -> tuple[Precision, Way]:
    generator = random.Random(f"{family} {variation}")
    return Precision.draw(generator), Way.draw(generator)


@dataclass
class Trial:
    """A family's checkpoint, and a store of it for each precision of weights, in `folder`."""

    source: ModelSource
    folder: Path

    def run(self, precision: Precision, way: Way) -> tuple[Answers, Counter[str]]:
        """What the rows of a way gave, and how often it streamed, shared, preempted and parked."""
        with torch_threads(way.threads):
            before = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = str(way.threads)
            try:
                plan, store = self._plan(precision, way), self._store(precision, way)
                with closing(load_engine(self.source, plan, store, stream=way.mode)) as loaded:
                    return _answers(loaded, way)
            finally:
                del os.environ["OMP_NUM_THREADS"]
                os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}

    def _plan(self, precision: Precision, way: Way) -> Plan:
        shape, settings = self.source.shape, precision.settings(way.tokens, way.sequences)
        job = Workload(len(TAILS) * SAMPLES, LONGEST)
        smallest, whole = budget_range(shape, settings, job)
        budgets = {"least": smallest, "half": (smallest + whole) // 2}
        plan = make_plan(shape, settings, MemoryBudget(budgets.get(way.budget, whole + (1 << 28))), job)
        specs = [KVSpec(group, precision.kv, way.block) for group in shape.kv_groups]
        blocks = [spec.blocks_for(LONGEST) * job.sequences for spec in specs]
        if way.spare is not None:
            least = [spec.least_blocks(LONGEST) for spec in specs]
            blocks = [count + max(1, int(count * way.spare)) for count in least]
        # A state is not parked.
        parked = [count * 8 * (way.parked and not shape.state_groups) for count in blocks]
        return replace(plan, kv_block=way.block, kv_blocks=tuple(blocks), parked_blocks=tuple(parked))

    def _store(self, precision: Precision, way: Way) -> Path | None:
        if way.budget == "in memory":
            return None
        store = self.folder / f"{precision.quant}-{precision.dtype}"
        prepare(self.source, store, precision.quant, precision.dtype, Budgets().on_cpu())
        return store


def faults(trial: Trial, precision: Precision, way: Way) -> tuple[list[str], Counter[str]]:
    """The rows of a way that differ from the plain way's, and what happened on it."""
    wanted, _ = trial.run(precision, Way())
    found, happened = trial.run(precision, way)
    different = [key for key, answer in found.items() if answer != wanted[key]]
    if len({str(answer) for answer in wanted.values()}) < len(wanted) // 2:
        return ["rows are equal, which shows nothing"], happened
    return ([f"rows {different} of {len(found)} differ: {precision}, {way}"] if different else []), happened


def _prompts() -> list[list[int]]:
    generator = random.Random(11)
    shared = [generator.randrange(5, 380) for _ in range(SHARED)]
    return [shared * (tail > 0) + [generator.randrange(5, 380) for _ in range(abs(tail))] for tail in TAILS]


def _answers(loaded: LoadedEngine, way: Way) -> tuple[Answers, Counter[str]]:
    engine, prompts = loaded.engine, _prompts()
    engine.scheduler.cache.sharing = way.sharing
    rows: dict[tuple[int, int], Sequence] = {}
    for index in way.kept:
        # Samples of a prompt that reports its own log-probabilities share them.
        own = {"max_tokens": NEW_TOKENS, "ignore_eos": True, **SAMPLING[index % len(SAMPLING)]}
        samples = [Sequence(prompts[index], SequenceSampling(**own, seed=seed), sample=seed) for seed in range(SAMPLES)]
        rows |= {(index, seed): each for seed, each in enumerate(samples)}
        if way.forked:
            samples[0].forks = samples[1:]
        for each in samples[: 1 if way.forked else None]:
            engine.add(each)
    list(engine.run())
    counts = engine.scheduler.counts
    happened = Counter(
        streamed=loaded.streamed.nbytes_from_disk > 0,
        preempted=counts.preemptions > 0,
        parked=counts.parked > 0,
        shared=counts.prefix_hit_tokens > 0,
    )
    return {key: _answer(each) for key, each in rows.items()}, happened


def _answer(row: Sequence) -> tuple[Any, ...]:
    scored = row.prompt_logprobs.tokens if row.prompt_logprobs is not None and row.sample == 0 else []
    return (row.output_ids, row.logprobs, scored)
