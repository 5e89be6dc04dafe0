"""From the files of a model to an engine that runs: plan, load, profile. Jobs, `LLM`, the server and the workers of a
cluster all go this way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ...moe.streaming_mode import Mode
from ...offload.budget import GIB
from ...offload.closing import Closing
from ...offload.device import Device
from ...offload.memory import Heap, reset_host_peak
from ..attention.cohorts import CohortAttention
from ..engine.lookup import MOST_DRAFTED
from ..engine.scheduler import Scheduler
from ..engine.sequence import Sequence, SequenceStatus
from ..loading.engine_loader import LoadedEngine, LoadedModel, load_engine, load_with_fallback
from ..loading.machine_memory import limit_pins, open_memory
from ..loading.prepare import release_memory, store_for
from ..plan.fallback import FallbackPolicy
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Plan, Workload
from ..plan.planner import PlanResult
from ..sampling.params import SequenceSampling
from ..settings.errors import OverBudget, SettingError
from ..settings.settings import MIB, Budgets, Settings
from ..source.model_source import ModelSource, open_source
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import MAX_TOKENS, TEXT, KeyOffsets
from .job_plan import plan_job
from .request import LLM_DEFAULTS, budgets_of, settings_of, stream_of


def plan_model(
    source: ModelSource,
    settings: Settings,
    budgets: Budgets,
    workload: Workload,
    saved: Path | None = None,
) -> tuple[Device | None, PlanResult]:
    """Opens the device and plans for `workload`, or takes the `saved` plan.

    Raises DoesNotFit, naming the smallest budget that works, SettingError, BadSize.
    """
    budget, device = open_memory(budgets, source.settle(settings), source.shape)
    return device, plan_job(source, settings, budgets, budget, workload, saved)


def load_model(
    source: ModelSource,
    tokenizer: Tokenizer,
    planned: tuple[Device | None, PlanResult],
    budgets: Budgets,
    stream: Mode | None = None,
    key_offsets: KeyOffsets | None = None,
) -> LoadedModel:
    """Weights into memory as planned, from a store where they do not fit; the store is made first where it is missing.
    With the model's MTP head where the plan has it.

    Whoever loads it closes its engine. Raises DoesNotFit, MemoryGaveOut.
    """
    device, chosen = planned
    source = source if source.shape.mtp == chosen.request.shape.mtp else replace(source, shape=chosen.request.shape)
    limit_pins(device, chosen.request.profile)
    policy = FallbackPolicy(chosen.plan, chosen.request)
    store = store_for(source, chosen.plan, budgets)
    folder = store and store.folder
    load = partial(load_engine, source, store=folder, device=device, stream=stream, key_offsets=key_offsets)
    engine = load_with_fallback(load, policy)
    written = store.nbytes_written if store else 0
    return LoadedModel(source, tokenizer, chosen, policy, engine, written)


# Random tokens that are generated at a time.
_DRAWN = 4096
# Tokens of a prompt in which the last ones occurred before.
_REPEATED = 4


def rehearse(loaded: LoadedEngine, plan: Plan, workload: Workload, tokens: Iterator[int]) -> None:
    """Runs one pass with as many prompt tokens and sampled rows as the plan allows, and one with as many drafted ones;
    the engine is as new afterwards.

    On a device, and where Triton kernels compute attention, passes follow at the end of the longest sequences, of a
    prompt and of generated tokens, which attend to more than others and split their keys: the job's find all memory
    that they need reserved. `tokens` come from `prompt_tokens`. Raises SettingError if values overflow in fp16. Check
    the engine's ledger after it: the peaks of the process are those of the worst pass then.
    """
    engine = loaded.engine
    live = min(plan.max_sequences, plan.tokens_per_pass, workload.sequences)
    cached = plan.kv_sequences + (plan.host_kv.sequences if plan.host_kv else 0)
    length = max(1, min(plan.tokens_per_pass // live, workload.longest - 1, plan.kv_tokens * cached // live - 1))
    cache = engine.scheduler.cache
    shared = cache.sharing
    # Else sequences with the same beginning would share blocks, and the pass would not be the largest.
    cache.sharing = False
    failed = _run_alone(loaded, live, length, 1, tokens)
    if plan.free_tokens:
        _run_drafted(loaded, live, min(workload.longest, plan.kv_tokens), next(tokens))
    if plan.attention == "triton" or loaded.device is not None:
        longest = max(1, min(workload.longest, plan.kv_tokens) - 1)
        share = (plan.kv_tokens * cached - longest) // max(1, live - 1)
        failed += _run_late(loaded, live, longest, share, tokens)
    if plan.attention == "triton":
        # Launches every kernel that attention may need in the job, for all layers that were rehearsed.
        # Imports Triton.
        from ..attention.triton_backend import TritonAttention

        attention = loaded.model.attention
        if isinstance(attention, CohortAttention):
            # Windows are attended to by the same kernels.
            attention = attention.device
        assert isinstance(attention, TritonAttention), "the plan names the backend"
        for launch in attention.warm_up_launches():
            launch.run()
    cache.sharing = shared
    loaded.start_counting()
    if failed and plan.dtype == "fp16":
        raise SettingError(
            f"{failed} rehearsed rows got logits that are not finite: this model's numbers overflow in fp16, whose "
            "largest is 65,504; nothing was run. Give --dtype bf16 or --dtype fp32, and another output: this one's job "
            "was begun in fp16."
        )


def prompt_tokens(text: Items[int], vocab: int) -> Iterator[int]:
    """Yields token ids without end: those of `text`, in which overflow would show, then random ones.

    Random tokens of the whole vocabulary reach the experts that the text does not.
    """
    yield from text
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randint(vocab, (_DRAWN,), generator=generator).tolist()


def _run_alone(loaded: LoadedEngine, live: int, length: int, generated: int, tokens: Iterator[int]) -> int:
    """Runs `live` sequences to their end; returns the number that got logits that are not finite."""
    for _ in range(live):
        # Sampled, not greedy: sampling needs the larger scratch.
        params = SequenceSampling(generated, temperature=1.0, ignore_eos=True)
        loaded.engine.add(Sequence(list(islice(tokens, length)), params))
    return sum(sequence.finish_reason == "error" for sequence in loaded.engine.run())


def _run_drafted(loaded: LoadedEngine, live: int, longest: int, token: int) -> None:
    """Runs one pass of `live` sequences with all rows of logits that drafted tokens may have."""
    engine = loaded.engine
    # One token over and over, which is expected to go on so.
    prompt = [token] * min(_REPEATED, longest - 1)
    for _ in range(live):
        params = SequenceSampling(min(MOST_DRAFTED + 1, longest - len(prompt)), temperature=1.0, ignore_eos=True)
        engine.add(Sequence(list(prompt), params))
    engine.step()
    if engine.predictor is not None:
        # A head drafts behind a pass.
        engine.step()
    engine.abort(lambda sequence: True)


def _run_late(loaded: LoadedEngine, live: int, longest: int, share: int, tokens: Iterator[int]) -> int:
    """Runs a pass that begins `live` sequences, one that ends a prompt of `longest` tokens, and one of a token of each,
    with `longest` tokens in the first and up to `share` in the others.

    What they attend to was never computed. Returns the number that got logits that are not finite in the first pass.
    """
    engine, scheduler = loaded.engine, loaded.engine.scheduler
    most = scheduler.limits.tokens_per_pass
    for length in (max(1, min(most - live + 1, longest // 2)), *(live - 1) * (1,)):
        params = SequenceSampling(longest + 1 - length, temperature=1.0, ignore_eos=True)
        engine.add(Sequence(list(islice(tokens, length)), params))
    failed = sum(sequence.finish_reason == "error" for sequence in engine.step())
    running, scheduler.running = scheduler.running, scheduler.running[:1]
    _skip(scheduler, scheduler.running, longest, max(1, min(most, longest // 2)))
    if engine.busy:
        engine.step()
    scheduler.running = [sequence for sequence in running if sequence.status is SequenceStatus.RUNNING]
    _skip(scheduler, scheduler.running, min(longest, share), 1)
    if engine.busy:
        engine.step()
    engine.abort(lambda sequence: True)
    return failed


def _skip(scheduler: Scheduler, sequences: Items[Sequence], end: int, count: int) -> None:
    """Gives sequences `end` tokens, as far as the cache has room, of which all but `count` pass for stored."""
    cache, most = scheduler.cache, scheduler.limits.tokens_per_pass
    for sequence in sequences:
        table = sequence.table
        while (more := min(most, end - count - table.num_tokens)) > 0 and cache.grow(table, table.num_tokens + more):
            cache.store(table, more)
        sequence.output_ids += [0] * (table.num_tokens + count - sequence.num_tokens)


# What the process may grow by beside passes, as a share of the budget and at least: rows, answers, tables, the heap.
_LEFT_SHARE, _LEFT_NBYTES = 0.04, 64 * MIB


def profile_model(loaded: LoadedModel, workload: Workload) -> Heap:
    """Runs the worst pass of the workload once, and lets more experts stay in the memory that it left.

    A plan reserves bounds, and this pass shows what is needed. Returns the heap's free memory as it left it, to be
    watched while others run. Raises DoesNotFit where a budget is too small for it.
    """
    tokens = prompt_tokens(loaded.tokenizer.encode(TEXT)[:MAX_TOKENS], loaded.source.shape.vocab)
    profile_engine(loaded.engine, loaded.policy.plan, workload, tokens)
    return Heap()


def profile_engine(engine: LoadedEngine, plan: Plan, workload: Workload, tokens: Iterator[int]) -> None:
    """The same of an engine without a tokenizer; `tokens` as for rehearse."""
    rehearse(engine, plan, workload, tokens)
    tier = engine.ledger.measure().computing
    engine.ledger.check()
    if tier.tier == "host" and tier.budget is not None and tier.peak is not None:
        # No prompt as long as the longest row was encoded.
        left = tier.budget - tier.peak - plan.encoder_nbytes - max(_LEFT_NBYTES, int(_LEFT_SHARE * tier.budget))
        engine.streamed.hold_more(max(0, left))


# A cache for the whole context of a long-context model would take most budgets, and few prompts need it.
MAX_MODEL_LEN = 4096


class OpenModel(Closing):
    """A checkpoint folder, a store or a hub id, with its tokenizer. Closing it also closes the engines it loaded."""

    def __init__(self, name: str) -> None:
        with ExitStack() as resources:
            self.source = resources.enter_context(open_source(name))
            self.tokenizer = resources.enter_context(Tokenizer.load(self.source.folder))
            self._engines = resources.enter_context(ExitStack())
            self._resources = resources.pop_all()

    def plan(self, settings: Settings, budgets: Budgets, workload: Workload) -> PlanResult:
        """The plan by which `load` would load. Raises DoesNotFit, SettingError, BadSize."""
        _, chosen = plan_model(self.source.speculating(settings), settings, budgets, workload)
        return chosen

    def load(
        self,
        settings: Settings,
        budgets: Budgets,
        workload: Workload,
        stream: Mode | None = None,
        key_offsets: KeyOffsets | None = None,
    ) -> LoadedModel:
        """Plans for `workload` and loads. The peak of host memory counts from here.

        Raises DoesNotFit, naming the smallest budget that works, SettingError, BadSize, MemoryGaveOut.
        """
        reset_host_peak()
        source = self.source.speculating(settings)
        planned = plan_model(source, settings, budgets, workload)
        loaded = load_model(source, self.tokenizer, planned, budgets, stream, key_offsets)
        self._engines.callback(loaded.engine.close)
        return loaded

    def load_for_prompts(self, options: Mapping[str, Any]) -> tuple[LoadedModel, Heap]:
        """Loads by the options of an LLM for prompts that nobody knows yet, and profiles the worst pass of them.

        Returns the heap's free memory as that pass left it, too. Raises as `load`, and SettingError for sequences that
        are longer than the context.
        """
        context = self.source.shape.context
        wanted = options.get("max_model_len") or min(MAX_MODEL_LEN, context)
        if wanted > context:
            raise SettingError(f"max_model_len {wanted:,} is more than the context of {context:,}")
        workload = workload_of(options, wanted)
        loaded = self.load(settings_of(options), budgets_of(options), workload, stream_of(options))
        return loaded, self.rehearse(loaded, workload)

    def rehearse(self, loaded: LoadedModel, workload: Workload) -> Heap:
        """profile_model, of a model that this has loaded."""
        return profile_model(loaded, workload)

    def close(self) -> None:
        """Frees every tier, as far as nobody else holds what was loaded."""
        self._resources.close()
        self.close_engines()

    def close_engines(self) -> None:
        """The same, and leaves the files open."""
        self._engines.close()
        release_memory()


def workload_of(options: Mapping[str, Any], longest: int) -> Workload:
    """What is planned for: `rows` sequences, the longest of `longest` tokens.

    The shortest is of the usual length: where memory is too small for the longest, the cache is as large as it can be.
    """
    wanted = {**LLM_DEFAULTS, **options}
    output = min(wanted["output_tokens"], max(1, longest // 2))
    prompt = min(wanted["prompt_tokens"], max(1, longest - output))
    return Workload(rows := wanted["rows"], longest, min(longest, prompt + output), rows * prompt, rows * output)


_TIERS = {"host": "RAM", "device": "GPU memory"}


def refuse_over_budget(tiers: Iterable[TierLedger], result: object) -> None:
    """Raises OverBudget with `result`, for which the work was done, where `tiers` used more than their budgets."""
    for tier in tiers:
        peak, budget = (tier.peak or 0) / GIB, (tier.budget or 0) / GIB
        raise OverBudget(
            f"{peak:.2f} GiB of {_TIERS[tier.tier]} were used, and the budget is {budget:.2f} GiB; the finished work "
            "is this error's `result`. Give a larger budget, or a smaller tokens_per_pass",
            result,
        )
