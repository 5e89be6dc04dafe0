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

from bench.gpu.checks import device_for_run
from bench.gpu.random_model import CONFIGS, load_random, random_source
from bench.gpu.report import Report
from bench.peers.accelerate_offload import best_batch
from bench.roofline import against_roofline, measure_rates
from moedge.offload.budget import parse_size
from moedge.offload.device import Device
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine
from moedge.runtime.loading.machine_memory import open_memory
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, DeviceBudget, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource

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
        report.step(name, "small", partial(measure_small, name, 0.0))
    for budget in () if fake else BUDGETS:
        for kv in KV:
            for sequences in SEQUENCES:
                report.step(name, f"{budget} {kv} {sequences}", partial(_run, name, budget, kv, sequences))
    if name == "qwen3" and fake:
        sizes = {size: value for size, value in SMALL.items() if size in CONFIGS[name]}
        report.step(name, "accelerate offload, small", partial(best_batch, 1 << 30, 8, sizes))
    for budget in BUDGETS if name == "qwen3" and not fake else ():
        report.step(name, f"{budget} accelerate offload", partial(_peer, report, budget))


def _run(name: str, budget: str, kv: str, sequences: int) -> dict[str, Any]:
    with random_source(name) as source:
        settings, memory = Settings(dtype="bf16", quant="nf4", kv=kv, max_sequences=sequences), memory_of(budget)
        job = Workload(sequences, PROMPT + STEADY + 2)
        cached = make_plan(source.shape, settings, memory[0], job).kv_sequences
        if any(cached <= fewer < sequences for fewer in SEQUENCES):
            return {"skipped": f"the cache has room for {cached} sequences: as with fewer"}
        return measure(source, memory, settings, PROMPT)


def _peer(report: Report, budget: str) -> dict[str, Any]:
    """The peer, and how many times its rate ours was in the runs of the same budget."""
    peer = best_batch(parse_size(budget, 0, 0), PROMPT)
    if "generated_tok_s" not in peer:
        return peer
    ours = [step["generated_tok_s"] for key, step in report.steps("qwen3") if key.startswith(budget) and "live" in step]
    return peer | {"ours_over_it": max(ours, default=0.0) / peer["generated_tok_s"]}


def memory_of(budget: str) -> tuple[MemoryBudget, Device | None]:
    return open_memory(Budgets(ram="80%", gpu_mem=budget))


def measure_small(name: str, share: float) -> dict[str, Any]:
    """On the fake device, with the least memory there that works, or that `share` of the way to all of it."""
    sizes = {size: value for size, value in SMALL.items() if size in CONFIGS[name]}
    with device_for_run(True, True, 0) as device, random_source(name, **sizes) as source:
        settings = Settings(dtype="bf16", quant="nf4", kv="int4", tokens_per_pass=32, max_sequences=2)
        granted = DeviceBudget(0, device.context_nbytes, 0)
        smallest, whole = budget_range(source.shape, settings, Workload(2, 8 + STEADY + 2), granted)
        granted = replace(granted, nbytes=smallest + int(share * (whole - smallest)))
        return measure(source, (MemoryBudget(1 << 32, granted), device), settings, 8)


def measure(
    source: ModelSource, memory: tuple[MemoryBudget, Device | None], settings: Settings, prompt: int
) -> dict[str, Any]:
    """One run: every sequence's prompt, then passes in which all of them decode."""
    sequences = settings.max_sequences
    assert sequences is not None
    job, (budget, device) = Workload(sequences, prompt + STEADY + 2), memory
    plan = make_plan(source.shape, settings, budget, job)
    with closing(load_random(source, plan, device)) as loaded:
        assert plan.kv_sequences is not None
        live = min(sequences, plan.kv_sequences)
        prompts, steady = _passes(loaded, live, prompt, source.shape.vocab)
        assert plan.staging is not None
        assert device is not None
        assert plan.budget.device is not None
        streamed = loaded.streamed.nbytes_to_device // loaded.engine.metrics.passes
        result: dict[str, Any] = {
            "live": live,
            "prompt_tok_s": live * prompt / sum(prompts),
            "pass_s": statistics.median(steady),
            "generated_tok_s": live / statistics.median(steady),
            "link_nbytes": streamed,
            "peak": device.peak,
            "budget": plan.budget.device.nbytes,
        }
        if streamed > (most := plan.weights_nbytes - plan.held_nbytes):
            raise AssertionError(f"{streamed} bytes crossed the link a pass, the plan says {most}")
    del loaded
    gc.collect()
    if result["peak"] > result["budget"]:
        raise AssertionError(f"the device's peak {result['peak']} is over {result['budget']}")
    rates = measure_rates()
    return result | against_roofline(source.shape, plan, rates, live, prompt + STEADY // 2, result)


def _passes(loaded: LoadedEngine, live: int, prompt: int, vocab: int) -> tuple[list[float], list[float]]:
    """Seconds of the passes that read prompts, and of those in which every sequence decodes and none reads."""
    generator, engine = torch.Generator().manual_seed(7), loaded.engine
    for _ in range(live):
        ids = torch.randint(5, vocab - 5, (prompt,), generator=generator).tolist()
        engine.add(Sequence(ids, SequenceSampling(STEADY, ignore_eos=True)))
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
