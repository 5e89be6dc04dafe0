"""A whole batch job without a model: everything but the tokenizer, the planner and the engine is the real thing.

Tokens are a function of the prompt, the seed and the position, so every run of a row gives the same answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moedge.runtime.engine.engine import Metrics
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import job_plan, lifecycle
from moedge.runtime.jobs import request as requests
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs.job import Measured, Running
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.jobs.session import Checked, Ended
from moedge.runtime.jobs.summary import summarise_rows
from moedge.runtime.plan.memory_ledger import TierLedger
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.model_shape import KVGroup

CONTEXT, LIVE = 4096, 32


class FakeText:
    def __init__(self) -> None:
        self.stopped = False
        self.text = ""

    def append(self, token_id: int) -> None:
        self.text += f" {token_id}"

    def finish(self) -> None:
        pass


class FakeTokenizer:
    """One token per byte."""

    eos_token_ids: tuple[int, ...] = ()
    chat_stop_ids: frozenset[int] = frozenset()
    answer_format = None

    @classmethod
    @contextmanager
    def load(cls, folder: Path, now: Any) -> Iterator[FakeTokenizer]:
        yield cls()

    def at_least(self, texts: Any, most: int) -> int:
        return 0

    def dated(self, now: Any) -> Any:
        return self.load(Path(), now)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]], *_: Any) -> list[int]:
        return self.encode("\n".join(f"{each['role']}:{each['content']}" for each in messages))

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return chr(token_id), bytes([token_id])

    def stream(self, stops: Any, min_tokens: int = 0) -> FakeText:
        return FakeText()

    def chat_stream(self, prompt_ids: list[int], options: Any) -> None:
        return None


class FakeEngine:
    """`hook` sees the live sequences before every pass; `pass_seconds` is what a pass takes."""

    def __init__(self, hook: Callable[[list[Sequence]], None] | None = None, pass_seconds: float = 0.0) -> None:
        self.metrics = Metrics()
        self.scheduler = self
        self.seconds_in_steps = 0.0
        self.cpu_seconds_in_steps = 0.0
        self._hook = hook
        self._pass_seconds = pass_seconds
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_capacity(self) -> bool:
        return len(self._waiting) < LIVE

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def start_counting(self) -> None:
        self.metrics = Metrics()

    def add(self, sequence: Sequence) -> None:
        self._waiting.extend([sequence, *sequence.forks])

    def step(self) -> list[Sequence]:
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        while self._waiting and len(self._running) < LIVE:
            self._running.append(self._waiting.popleft())
        if self._hook is not None:
            self._hook(self._running)
        for sequence in self._running:
            sequence.append(next_token(sequence), None)
        self.metrics.passes += 1
        self.metrics.generated_tokens += len(self._running)
        finished = [sequence for sequence in self._running if sequence.finished]
        self._running = [sequence for sequence in self._running if not sequence.finished]
        for sequence in finished:
            self.metrics.prompt_tokens += len(sequence.prompt_ids)
            self.metrics.count_finished(sequence)
        if self._pass_seconds:
            time.sleep(max(0.0, self._pass_seconds - (time.perf_counter() - begun)))
        self.seconds_in_steps += time.perf_counter() - begun
        self.cpu_seconds_in_steps += time.thread_time() - cpu_begun
        return finished


def next_token(sequence: Sequence) -> int:
    return (sum(sequence.prompt_ids) + 31 * len(sequence.output_ids) + sequence.params.seed) % 251


def fake_shape() -> Any:
    groups = (KVGroup((0,), 1, 2, None),)
    return SimpleNamespace(vocab=256, context=CONTEXT, kv_groups=groups, layers=(), head=None, num_experts=0, mtp=False)


def fake_source(name: str) -> Any:
    source = SimpleNamespace(
        name=name, folder=Path("/nonexistent-model"), shape=fake_shape(), store=None, settle=lambda settings: settings
    )
    source.speculating = lambda _: source
    return source


# What computes attention on this machine, and whether activations are rounded.
BACKEND = "torch"
COMPUTE = "float"


def fake_plan(settings: Settings) -> Any:
    chosen = {"dtype": "fp32", "quant": "none", "kv": "fp32", "attention": BACKEND, "compute": COMPUTE}
    chosen["deterministic"] = settings.deterministic
    budget = SimpleNamespace(host_nbytes=0)
    plan = SimpleNamespace(**chosen, budget=budget, kv_tokens=CONTEXT, tokens_per_pass=1024, as_dict=lambda: chosen)
    told = SimpleNamespace(generated_tok_s=1.0, seconds=1.0, bottleneck="compute")
    workload = SimpleNamespace(longest=CONTEXT)
    costs = SimpleNamespace(rates=SimpleNamespace(measured=False))
    request = SimpleNamespace(profile=None, workload=workload, costs=costs, shape=fake_shape())
    return SimpleNamespace(plan=plan, prediction=told, seconds={}, request=request)


def fake_loaded(engine: FakeEngine, key_offsets: Any = None, close: Callable[[], None] = lambda: None) -> Any:
    computing = TierLedger("host", None)
    ledger = SimpleNamespace(over_budget=[], check=lambda: None, computing=computing)
    ledger.measure = lambda: ledger
    experts = SimpleNamespace(stats=SimpleNamespace(layers={}), cache=None)
    return SimpleNamespace(
        engine=engine,
        streamed=SimpleNamespace(nbytes_moved=0, fail=lambda cause: None, experts=experts),
        start_counting=engine.start_counting,
        close=close,
        key_offsets=key_offsets,
        ledger=ledger,
        loss={},
    )


def given_model(engine: FakeEngine, close: Callable[[], None]) -> Any:
    """A model that a job is given, ready for its first pass; `close` is called by whoever closes its engine."""
    chosen = fake_plan(Settings())
    return SimpleNamespace(
        source=fake_source("fake"),
        tokenizer=FakeTokenizer(),
        chosen=chosen,
        policy=SimpleNamespace(plan=chosen.plan, applied=[]),
        engine=fake_loaded(engine, close=close),
        longest=CONTEXT,
    )


def install(engine: Callable[[], FakeEngine], setattr: Callable[[object, str, object], None] = setattr) -> None:
    """Puts the fakes where a batch job looks for a model; `setattr` may be one that is undone later."""

    @contextmanager
    def open_source(name: str) -> Iterator[SimpleNamespace]:
        yield fake_source(name)

    def load_engine(source: Any, plan: Any, store: Any, device: Any, stream: Any, key_offsets: Any) -> Any:
        return fake_loaded(engine(), key_offsets)

    setattr(sessions, "open_source", open_source)
    setattr(job_plan, "refuse_too_small", lambda *_: None)
    setattr(lifecycle, "plan_job", lambda source, settings, *_, **__: fake_plan(settings))
    setattr(states, "with_workload", lambda chosen, plan, workload: chosen)
    setattr(lifecycle, "load_engine", load_engine)
    setattr(lifecycle, "load_with_fallback", lambda load, policy: load(policy.plan))
    setattr(lifecycle, "FallbackPolicy", lambda plan, request: SimpleNamespace(plan=plan, applied=[]))
    setattr(states, "remember", lambda *_: None)
    setattr(states, "Tokenizer", FakeTokenizer)
    setattr(lifecycle, "rehearse", lambda *_: None)
    setattr(lifecycle, "store_for", lambda *_: None)
    setattr(states, "summarise", lambda model, chosen, counts, *_: summarise_rows(counts))
    setattr(states, "expert_use", lambda loaded: None)
    setattr(requests, "_model", lambda source: "fake")


def run(request: BatchRequest) -> Ended:
    """The whole job, or as much of it as its limits allow."""
    with Checked.open(request) as checked:
        if checked.finished:
            return checked.publish()
        running = Running(Measured.of(checked).plan().load())
        for _ in running.passes():
            pass
        return running.end()
