"""Part `hour`: what a borrowed GPU is asked first, in the order in which plans depend on it.

The machine's profile; where a pass's time goes, for link, device and host, beside what was predicted of each; the same
over a link that is slowed, and with everything held; the kernels, also with fewer multiprocessors; then tokens. Every
step is saved on its own. It ends with a page that has what was predicted beside what was measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.checks import WITH_KERNELS, _kernels, device_for_run
from bench.gpu.random_model import CONFIGS, load_random, random_source
from bench.gpu.report import Report
from bench.gpu.throughput import SMALL, memory_of
from bench.kernels import _time, timed_attention, timed_experts
from moedge.offload.machine.hardware import find_hardware
from moedge.offload.machine.profile import Machine
from moedge.offload.stream.cuda_lane import CudaLane
from moedge.runtime.calibration.machine_profile import machine_profile, saved_profile
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine
from moedge.runtime.plan import cost_model
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.plan.presets import find_preset, with_preset
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.weights import streaming

# An H200 has the multiprocessors, the clock and the link of an H100.
_, H100 = find_preset("H100 80GB")
SHEETS = {"NVIDIA H200": replace(H100, gib=141, bandwidth=4800), "NVIDIA H100 80GB HBM3": H100}
# About half of an H100, and those of an RTX 4060: compute capability 9.0 gives multiples of eight.
MULTIPROCESSORS = (64, 24)
SPIN_S = 0.005
ROWS_SHOWN = 40


@dataclass(frozen=True)
class Asked:
    """One engine to look into: random weights of `config`; `links` are how many times each byte is copied.

    Tokens that random weights choose are nearly all the same, and want few experts: layers get others in their place.
    """

    config: str
    budget: str
    prompt: int
    settings: Settings
    links: tuple[int, ...] = (1,)
    profiled: int = 1
    temperature: float = 0.0

    @property
    def title(self) -> str:
        quant, sequences = self.settings.quant, self.settings.max_sequences
        return f"{self.config} in {self.budget}, {quant}, {sequences} sequences"


ASKED = (
    # Greedy rows of 110 tokens with 128 to generate: the job that an H100 ran in passes of 115 ms.
    Asked("s", "2GiB", 110, Settings(dtype="bf16", quant="none", kv="bf16", max_sequences=423), profiled=3),
    Asked("qwen3", "24GiB", 128, Settings(dtype="bf16", quant="nf4", kv="int4", max_sequences=384), temperature=1.0),
    Asked("qwen3", "12GiB", 128, Settings(dtype="bf16", quant="nf4", kv="int4", max_sequences=384), links=(1, 2, 4)),
    # What fewer bits of experts save over a link, and what they take to decode.
    *(
        Asked("qwen3", "12GiB", 128, Settings(dtype="bf16", quant=quant, kv="int4", max_sequences=384))
        for quant in ("int4", "int4+int3", "int4+vq2")
    ),
    # Few rows: the CPU computes experts beside the link, where that is predicted to be faster.
    Asked("qwen3", "12GiB", 128, Settings(dtype="bf16", quant="int4", kv="int4", max_sequences=16)),
)
TINY = Asked("qwen3", "", 8, Settings(dtype="bf16", quant="nf4", kv="int4", tokens_per_pass=8, max_sequences=4))


def run_hour(report: Report, fake: bool) -> None:
    if fake:
        report.step("hour", "passes, small", partial(_small, TINY))
        return
    report.step("hour", "machine", _machine)
    for asked in ASKED:
        report.step("hour", f"passes, {asked.title}", partial(_passes, asked))
    report.step("hour", "attention, time", partial(_time, partial(timed_attention, torch.cuda.get_device_capability())))
    report.step("hour", "experts, time", partial(_time, timed_experts))
    for count in MULTIPROCESSORS:
        attention = partial(timed_attention, torch.cuda.get_device_capability(), count)
        for name, cases in (("attention", attention), ("experts", timed_experts)):
            step = f"{name}, time, {count} multiprocessors"
            report.step("hour", step, partial(_in_own_process, time_with, count, cases))
    for family, quant, kv in WITH_KERNELS:
        report.step("hour", f"kernels, {family} {quant} {kv}", partial(_kernels, family, quant, kv, fake))
    print(*page(report.steps("hour")), sep="\n")


def page(steps: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """What data sheet and counts predicted of passes beside what was measured: milliseconds, and the ratio of both."""
    yield "| pass | link | device | host | whole | ratio |"
    yield "|---|---|---|---|---|---|"
    for name, step in steps:
        for link, found in step.items():
            if not link.startswith("link / ") or not (wanted := step["predicted"]["data sheet"]):
                continue
            times = int(link.removeprefix("link / "))
            predicted = [wanted["link_s"] * times, wanted["compute_s"], wanted["host_s"]]
            measured = [found["link_s"] * times, step["profiled"]["device_s"], found["thread_s"]]
            pairs = [*zip(predicted, measured, strict=True), (max(predicted), found["pass_s"])]
            cells = [f"{1e3 * one:.1f} / {1e3 * other:.1f}" for one, other in pairs]
            yield f"| {name}, {link} | {' | '.join(cells)} | {max(predicted) / found['pass_s']:.2f} |"


def _machine() -> dict[str, Any]:
    return asdict(machine_profile(Path.cwd(), again=True))


def _small(asked: Asked) -> dict[str, Any]:
    sizes = {size: value for size, value in SMALL.items() if size in CONFIGS[asked.config]}
    with device_for_run(True, True, 0) as device, random_source(asked.config, **sizes) as source:
        return _look(source, asked, (memory_of("auto")[0], device))


def _passes(asked: Asked) -> dict[str, Any]:
    # What a step that failed has left would count against this one's budget.
    gc.collect()
    torch.cuda.empty_cache()
    with random_source(asked.config) as source:
        return _look(source, asked, memory_of(asked.budget))


def _in_own_process(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Where nothing has used CUDA before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def time_with(multiprocessors: int, cases: Callable[[], Iterable[Any]]) -> dict[str, Any]:
    """Times of kernels that have so many of the GPU's multiprocessors, and shares of what a copy reaches by as many.

    By a green context (CUDA 12.4, torch 2.11); `skipped` says why there is none.
    """
    try:
        from torch.cuda.green_contexts import GreenContext

        # Streams belong to the context in which they are made, kernels to that in which they are loaded.
        context: Any = GreenContext.create(num_sms=multiprocessors, device_id=0)
        context.set_context()
    except (ImportError, RuntimeError) as refused:
        return {"skipped": f"no green context of {multiprocessors} multiprocessors: {refused}"}
    return _time(cases)


class SlowedLane(CudaLane):
    """A link that is `times` slower: each byte is copied so many times."""

    times = 1

    def move(self, begin: int, slot: Any) -> None:
        for _ in range(SlowedLane.times):
            super().move(begin, slot)


WARM, TIMED = 2, 4


def _look(source: Any, asked: Asked, memory: tuple[Any, Any]) -> dict[str, Any]:
    """Passes in which every sequence decodes: their seconds, and those of link, device and host in them."""
    settings, (budget, device) = asked.settings, memory
    wanted = settings.max_sequences
    assert wanted is not None
    tokens = len(asked.links) * (WARM + TIMED) + asked.profiled + TIMED + 1
    plan = make_plan(source.shape, settings, budget, Workload(wanted, asked.prompt + tokens))
    # The first sequences decode while the last ones' prompts are read.
    tokens += -(-wanted * asked.prompt // max(1, plan.tokens_per_pass - wanted))
    plan = make_plan(source.shape, settings, budget, Workload(wanted, asked.prompt + tokens))
    found: dict[str, Any] = {"held_nbytes": plan.held_nbytes, "weights_nbytes": plan.weights_nbytes}
    begun = time.perf_counter()
    with patch.object(streaming, "CudaLane", SlowedLane), closing(load_random(source, plan, device)) as loaded:
        found["loading_s"] = time.perf_counter() - begun
        live = min(wanted, plan.kv_sequences or wanted, plan.max_sequences)
        loaded.model.model.get_input_embeddings().register_forward_pre_hook(partial(_other_tokens, source.shape.vocab))
        found |= {"live": live, "tokens_per_pass": plan.tokens_per_pass}
        found["prompts"] = _start(loaded, live, asked, tokens, source.shape.vocab)
        load = cost_model._PassLoad(live, 0, 1, 0, asked.prompt + tokens / 2, 0)
        found["predicted"] = _predicted(source.shape, plan, load)
        for times in asked.links:
            SlowedLane.times = times
            found[f"link / {times}"] = _timed(loaded)
        SlowedLane.times = 1
        found["profiled"] = _profiled(loaded, asked.profiled)
        found["stacks"] = _stacks(loaded, TIMED)
        if (graphs := loaded.model.seams.graphs) is not None:
            found["graphs"] = {"replayed": graphs.replayed, "lack": graphs.lack}
        found["peak"] = device.peak if device is not None else 0

    return found


def _other_tokens(vocab: int, embedding: Any, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (torch.randint_like(arguments[0], vocab),)


def _start(loaded: LoadedEngine, live: int, asked: Asked, tokens: int, vocab: int) -> dict[str, Any]:
    generator, engine = torch.Generator().manual_seed(7), loaded.engine
    engine.scheduler.cache.sharing = False
    for _ in range(live):
        ids = torch.randint(5, vocab - 5, (asked.prompt,), generator=generator).tolist()
        engine.add(Sequence(ids, SequenceSampling(tokens, temperature=asked.temperature, ignore_eos=True)))
    seconds: list[float] = []
    begun_with = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    found: dict[str, Any] = {}
    while engine.metrics.prompt_tokens < live * asked.prompt:
        if len(seconds) == 8:
            found["stacks"] = _stacks(loaded, TIMED)
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    ended_with = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    found |= {
        name: ended_with.get(name, 0) - begun_with.get(name, 0)
        for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")
    }
    if len(engine.scheduler.running) < live:
        raise AssertionError(f"{len(engine.scheduler.running)} of {live} sequences decode after their prompts")
    rate = live * asked.prompt / sum(seconds)
    return found | {"passes": len(seconds), "pass_s": statistics.median(seconds), "tok_s": rate}


def _predicted(shape: ModelShape, plan: Plan, load: Any) -> dict[str, Any]:
    """By the machine's own profile, and by its data sheet."""
    measured = saved_profile(Path.cwd())
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    sheet = with_preset(name, SHEETS[name], find_hardware(Path.cwd()), measured) if name in SHEETS else None
    found = {}
    for name, machine in (("profile", measured), ("data sheet", sheet)):
        found[name] = _pass_cost(shape, plan, load, machine) if machine is not None else {}
    return found


def _pass_cost(shape: ModelShape, plan: Plan, load: Any, machine: Machine) -> dict[str, float]:
    rates = rates_of(machine, on_device=True)
    return asdict(cost_model.CostModel(shape, rates).pass_costs(plan).cost(load))


def _timed(loaded: LoadedEngine) -> dict[str, float]:
    """`link_s` are those in which copies ran, `waited_s` those in which the device waited for them."""
    for _ in range(WARM):
        loaded.engine.step()
    before = _counts(loaded)
    seconds = []
    for _ in range(TIMED):
        begun = time.perf_counter()
        loaded.engine.step()
        seconds.append(time.perf_counter() - begun)
    after = _counts(loaded)
    return {"pass_s": statistics.median(seconds)} | {name: (after[name] - before[name]) / TIMED for name in after}


def _counts(loaded: LoadedEngine) -> dict[str, float]:
    """Seconds that the calling thread computed, and what its lane counts, so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    streamed = loaded.streamed
    return {
        "thread_s": time.thread_time(),
        "link_s": sum(stream.lane.seconds_busy for stream in streamed._lanes.streams),
        "waited_s": streamed.seconds_waited[1],
        "link_nbytes": float(streamed.nbytes_to_device),
    }


def _profiled(loaded: LoadedEngine, passes: int) -> dict[str, Any]:
    """Per pass: seconds of the device's kernels and copies, and calls with their own seconds on the host."""
    on_device = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    begun = time.perf_counter()
    with profile(activities=activities) as profiler:
        for _ in range(passes):
            loaded.engine.step()
        if on_device:
            torch.cuda.synchronize()
    wall = (time.perf_counter() - begun) / passes
    events = profiler.key_averages()
    device = Counter({each.key: each.self_device_time_total / 1e6 / passes for each in events})
    host = Counter({each.key: each.self_cpu_time_total / 1e6 / passes for each in events})
    counts = {each.key: each.count / passes for each in events}
    copies = sum(seconds for name, seconds in device.items() if name.startswith("Memcpy HtoD"))
    return {
        "pass_s": wall,
        "device_s": sum(device.values()) - copies,
        "copies_s": copies,
        "device": _most(device, counts),
        "host": _most(host, counts),
    }


def _most(seconds: Counter[str], counts: dict[str, float]) -> dict[str, str]:
    return {
        name[:120]: f"{each * 1e3:.3f} ms, {counts[name]:.0f} calls"
        for name, each in seconds.most_common(ROWS_SHOWN)
        if each
    }


def _stacks(loaded: LoadedEngine, passes: int) -> dict[str, Any]:
    """The calling thread's stack every millisecond: the share of each line itself, and of each function of moedge."""
    lines: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    begun = time.perf_counter()
    with _watched() as stacks:
        for _ in range(passes):
            loaded.engine.step()
    pass_s = (time.perf_counter() - begun) / passes
    for stack in stacks:
        code, line = stack[0]
        lines[_place(code.co_filename, f"{code.co_name}:{line}")] += 1
        functions.update({_place(code.co_filename, code.co_name) for code, _ in stack})
    each = 1e3 * pass_s / max(1, len(stacks))
    return {
        "pass_s": pass_s,
        "samples": len(stacks),
        "lines, ms": {name: round(count * each, 3) for name, count in lines.most_common(ROWS_SHOWN)},
        "functions, ms": {name: round(count * each, 3) for name, count in functions.most_common(2 * ROWS_SHOWN)},
    }


@contextmanager
def _watched() -> Iterator[list[list[tuple[Any, int]]]]:
    """The stacks of the calling thread, taken now and then by another.

    It does as little as it can: each time it holds Python's lock, for which a thread that calls CUDA waits.
    """
    thread, ended = threading.get_ident(), threading.Event()
    stacks: list[list[tuple[Any, int]]] = []

    def watch() -> None:
        while not ended.wait(SPIN_S):
            stack: list[tuple[Any, int]] = []
            frame: FrameType | None = sys._current_frames()[thread]
            while frame is not None:
                stack.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            stacks.append(stack)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield stacks
    ended.set()
    watcher.join()


def _place(file: str, name: str) -> str:
    return f"{os.sep.join(Path(file).parts[-3:])} {name}"
