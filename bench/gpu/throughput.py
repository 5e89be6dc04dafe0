"""Parts `qwen3`, `mixtral`, `gpt-oss`: tokens per second in real shapes within small device budgets."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from checks import device_for_run
from random_model import CONFIGS, load_random, random_source
from report import Report

from moedge.offload.machine.device import measure_link
from moedge.runtime.load import LoadedEngine
from moedge.runtime.model_source import ModelSource
from moedge.runtime.plan.budgets import Budgets
from moedge.runtime.plan.device_plan import DeviceRoom
from moedge.runtime.plan.job import JobShape
from moedge.runtime.plan.planner import Settings, budget_range, make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.sequence import Sequence
from moedge.runtime.tiers import Tiers, open_tiers

PROMPT, STEADY = 512, 12
BUDGETS = ("8GiB", "12GiB")
SEQUENCES = (64, 256, 1024)
KV = ("bf16", "int8", "int4")
# What runs without a GPU: the same code on a few hundredths of the sizes.
SMALL = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_local_experts": 8,
    "vocab_size": 512,
}  # fmt: skip


def run_model(name: str, report: Report, fake: bool) -> None:
    if fake:
        report.step(name, "small", partial(_run_small, name))
        return
    for budget in BUDGETS:
        for kv in KV:
            for sequences in SEQUENCES:
                report.step(name, f"{budget} {kv} {sequences}", partial(_run, name, budget, kv, sequences))


def _run(name: str, budget: str, kv: str, sequences: int) -> dict[str, Any]:
    with random_source(name) as source:
        tiers = open_tiers(Budgets(ram="80%", gpu_mem=budget))
        settings = Settings("bf16", "nf4", kv, tokens_per_pass=max(1024, sequences), max_sequences=sequences)
        return measure(source, tiers, settings, PROMPT)


def _run_small(name: str) -> dict[str, Any]:
    """On the fake device, with the least memory there that works, so that everything streams."""
    sizes = {size: value for size, value in SMALL.items() if size in CONFIGS[name]}
    with device_for_run(True, True, 0) as device, random_source(name, **sizes) as source:
        settings = Settings("bf16", "nf4", "bf16", tokens_per_pass=32, max_sequences=2)
        room = DeviceRoom(0, device.context_nbytes, 0)
        smallest, _ = budget_range(source.shape, settings, JobShape(2, 8 + STEADY + 2), room)
        return measure(source, Tiers(1 << 32, device, replace(room, budget_nbytes=smallest)), settings, 8)


def measure(source: ModelSource, tiers: Tiers, settings: Settings, prompt: int) -> dict[str, Any]:
    """One run: every sequence's prompt, then passes in which all of them decode."""
    sequences = settings.max_sequences
    job = JobShape(sequences, prompt + STEADY + 2)
    plan = make_plan(source.shape, settings, tiers.host_nbytes, job, tiers.room)
    with closing(load_random(source, plan, tiers.device)) as loaded:
        live = min(sequences, plan.kv_sequences)
        prompts, steady = _passes(loaded, live, prompt, source.shape.vocab)
        assert plan.device is not None
        assert tiers.device is not None
        streamed = plan.weights_nbytes - plan.held_nbytes
        result = {
            "live": live,
            "prompt_tok_s": live * prompt / sum(prompts),
            "pass_s": statistics.median(steady),
            "generated_tok_s": live / statistics.median(steady),
            "link_nbytes": streamed,
            "peak": tiers.device.peak,
            "budget": plan.device.budget_nbytes,
        }
        moved = loaded.streamed.nbytes_to_device
        if moved != streamed * loaded.engine.metrics.passes:
            raise AssertionError(f"{moved} bytes crossed the link, the plan says {streamed} a pass")
    del loaded
    gc.collect()
    if result["peak"] > result["budget"]:
        raise AssertionError(f"the device's peak {result['peak']} is over {result['budget']}")
    return result | _bound(streamed, result["pass_s"])


def _passes(loaded: LoadedEngine, live: int, prompt: int, vocab: int) -> tuple[list[float], list[float]]:
    """Seconds of the passes that read prompts, and of those in which every sequence decodes and none reads."""
    generator, engine = torch.Generator().manual_seed(7), loaded.engine
    for _ in range(live):
        ids = torch.randint(5, vocab - 5, (prompt,), generator=generator).tolist()
        engine.add(Sequence(ids, SamplingParams(STEADY, ignore_eos=True)))
    prompts, steady = [], []
    while engine.busy:
        before, begun = engine.metrics.prompt_tokens, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        if engine.metrics.prompt_tokens > before:
            prompts.append(seconds)
        elif len(engine.scheduler.running) == live or not engine.busy:
            steady.append(seconds)
    return prompts, steady or prompts


def _bound(streamed: int, seconds: float) -> dict[str, float]:
    """The pass against the link, by its rate in this very run."""
    link = measure_link(256 << 20)
    if link is None or link.pinned_bytes_s is None:
        return {}
    bound = streamed / link.pinned_bytes_s
    return {"link_s": bound, "pass_over_link": seconds / bound if bound else 0.0}
