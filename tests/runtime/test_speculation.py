"""Drafted tokens (`runtime/engine/lookup.py`) never show in what is generated, but in the number of passes.

Whoever drafts here knows the answer and errs on purpose (support/oracle.py), so that drafts are accepted, rejected and
cut in every way; counters show it. Each planted bug is found by the trial that is named beside it.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.offload.machine.profile import Overheads
from moedge.runtime.engine import engine as engine_module
from moedge.runtime.engine import scheduler as scheduler_module
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.lookup import MOST_DRAFTED, Lookup
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Batch, Sequence, SequenceStatus
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, make_plan, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.source.model_source import ModelSource, open_source
from support.oracle import foresee

SHARED, NEW_TOKENS, LONGEST = 37, 14, 90
# Of passes with few sequences more is free than of others; none has enough for all.
FREE = (16, 20, 24, 24)
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 1.3, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "penalised and sampled": {"temperature": 0.8, "seed": 5, "frequency_penalty": 1.0, "logprobs": 0},
    "biased": {"logit_bias": ((7, 2.5), (11, -9.0)), "temperature": 0.7, "seed": 9},
    "scored": {"prompt_logprobs": 2, "logprobs": 2},
    "short": {"max_tokens": 3},
}


class StopAt:
    """Text that is complete with a token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.stopped = False

    def append(self, token_id: int) -> None:
        self.stopped |= token_id == self.token_id


def rows(answers: list[list[int]]) -> list[Sequence]:
    """One sequence of each kind over prompts that begin alike, the first with two samples.

    With the answers of the first two, three more that would have these, but end early; their drafts go on behind it.
    """
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(5, 380, (len(PARAMS), LONGEST), generator=generator).tolist()
    found = []
    for index, (one, params) in enumerate(zip(ids, PARAMS.values(), strict=True)):
        prompt = ids[0][:SHARED] + one[: 5 * index]
        found.append(Sequence(prompt, SequenceSampling(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, **params})))
    sample = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.9}
    found[0].forks = [Sequence(found[0].prompt_ids, SequenceSampling(seed=seed, **sample)) for seed in (1, 2)]
    if answers:
        (greedy, answer), prompt = answers, found[1].prompt_ids
        params = {"max_tokens": NEW_TOKENS, **PARAMS["sampled"]}
        stop = SequenceSampling(NEW_TOKENS, stop_token_ids=(greedy[6],))
        late = SequenceSampling(**params, stop_token_ids=(answer[2],), min_tokens=4)
        early = [
            Sequence(found[0].prompt_ids, stop),
            Sequence(prompt, late, frozenset([answer[7]])),
            Sequence(prompt, SequenceSampling(**params), text=StopAt(answer[4])),
        ]
        found += [foresee(each, wanted, 1000) for each, wanted in zip(early, (greedy, answer, answer), strict=True)]
    return found


def everyone(sequences: list[Sequence]) -> list[Sequence]:
    return [each for sequence in sequences for each in (sequence, *sequence.forks)]


@dataclass(frozen=True)
class Way:
    """How rows are run: `spare` is how much of the pool is left beside the smallest, None for ample. `halves` says that
    memory gives out in every pass of more than a few tokens."""

    kv: str = "fp32"
    deterministic: bool = True
    tokens_per_pass: int = 128
    spare: float | None = None
    parked: bool = False
    smallest: bool = False
    halves: bool = False


WAYS = {
    "plain": Way(),
    "int8": Way(kv="int8"),
    "int4": Way(kv="int4"),
    "small passes": Way(tokens_per_pass=23),
    "tight": Way(spare=0.05),
    "tight, parked": Way(spare=0.05, parked=True),
    "smallest budget": Way(smallest=True),
    "halves": Way(halves=True),
}


def plan_for(source: ModelSource, way: Way) -> Plan:
    settings = Settings(
        dtype="fp32", quant="none", kv=way.kv, tokens_per_pass=way.tokens_per_pass, max_sequences=8,
        deterministic=way.deterministic,
    )  # fmt: skip
    job = Workload(14, LONGEST)
    nbytes = budget_range(source.shape, settings, job)[0] if way.smallest else 4 << 30
    plan = make_plan(source.shape, settings, MemoryBudget(nbytes), job)
    specs = [KVSpec(group, way.kv, 8) for group in source.shape.kv_groups]
    blocks = [
        spec.blocks_for(LONGEST) * 14 if way.spare is None else spec.least_blocks(LONGEST) * (1 + way.spare) + 1
        for spec in specs
    ]
    if way.smallest:
        return plan
    parked = tuple(int(count) * 8 * way.parked for count in blocks)
    return replace(plan, kv_block=8, kv_blocks=tuple(map(int, blocks)), parked_blocks=parked)


def give_out(engine: Engine) -> None:
    """Lets memory give out in passes of more than ten tokens; the fallback changes nothing."""
    forward = engine.model.forward

    def fails(batch: Batch) -> torch.Tensor:
        if batch.num_tokens > 10:
            raise torch.OutOfMemoryError("no memory")
        return forward(batch)

    engine.model.forward = fails  # type: ignore[method-assign]
    engine.split_retry.fall_back = lambda cause, tokens: None


def run(source: ModelSource, way: Way, sequences: list[Sequence], free: tuple[int, ...], store: Path | None) -> Engine:
    plan = replace(plan_for(source, way), free_tokens=free, undrafted="")
    with closing(load_engine(source, plan, store if way.smallest else None)) as loaded:
        engine: Engine = loaded.engine
        if way.halves:
            give_out(engine)
        for sequence in sequences:
            engine.add(sequence)
        while engine.busy:
            engine.step()
            for each in engine.scheduler.running:
                for group, blocks in zip(engine.scheduler.cache.groups, each.table.blocks, strict=True):
                    assert len(blocks) == group.spec.blocks_for(each.table.num_tokens), "blocks leaked"
        assert all(group.allocator.num_live == 0 for group in engine.scheduler.cache.groups)
    return engine


def trial(source: ModelSource, way: Way, store: Path | None = None) -> Engine:
    """Compares all of a run with drafts to one without."""
    first = rows([])
    run(source, way, first, (), store)
    answers = [each.output_ids for each in first[:2]]
    plain, drafting = rows(answers), rows(answers)
    pairs = list(zip(everyone(drafting), everyone(plain), strict=True))
    without = run(source, way, plain, (), store)
    for seed, (ours, theirs) in enumerate(pairs[:-3]):
        foresee(ours, theirs.output_ids, seed=seed)
    engine = run(source, way, drafting, FREE, store)
    for ours, theirs in pairs:
        assert ours.output_ids == theirs.output_ids, ours.params
        assert (ours.finish_reason, ours.error) == (theirs.finish_reason, theirs.error)
        assert len(ours.logprobs) == len(theirs.logprobs)
        if way.deterministic:
            assert ours.logprobs == theirs.logprobs
            assert ours.prompt_logprobs == theirs.prompt_logprobs
    # Those that end early do.
    assert [len(each.output_ids) for each in plain[-3:]] < [NEW_TOKENS] * 3
    counts = engine.metrics
    assert counts.generated_tokens == without.metrics.generated_tokens == sum(len(each.output_ids) for each, _ in pairs)
    assert 0 < counts.accepted_tokens < counts.drafted_tokens
    assert counts.passes < without.metrics.passes
    assert (engine.scheduler.counts.preemptions > 0) == (way.spare is not None)
    return engine


@pytest.mark.sample("plain-qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3_text", "llama4_text"])
@pytest.mark.parametrize("way", WAYS)
def test_drafted_tokens_show_in_no_bit(way: str, family: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Windows, chunks, sinks and latents; rows of every kind of sampling, with samples, stops and log-probabilities."""
    with open_source(str(checkpoint(family, num_hidden_layers=2))) as source:
        if WAYS[way].smallest:
            prepare(source, tmp_path / "store", "none", "fp32", Budgets().on_cpu())
        trial(source, WAYS[way], tmp_path / "store")


@pytest.mark.sample("qwen3_moe-int8")
@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_nor_in_tokens_by_default(family: str, kv: str, checkpoint: Callable[..., Path]) -> None:
    """In fp32, where rounding changes no token of these rows, by the CPU's kernels for generated tokens."""
    with open_source(str(checkpoint(family, num_hidden_layers=2))) as source:
        engine = trial(source, Way(kv=kv, deterministic=False))
    assert engine.metrics.accepted_tokens > 40


NOTHING = Overheads(1e-12, 1e-12, 1e-12, 1e-15, 1e-12, 1e-15)


def planned(folder: Path, disk_bytes_s: float = 1e5, flop_s: float = 1e9, ample: bool = False, **changed: Any) -> Plan:
    """A plan of the tiny model on a machine of such a disk and processor, in memory for hardly any weights."""
    settings = Settings(**{"dtype": "fp32", "quant": "none", "kv": "fp32", "max_sequences": 8, **changed})
    job, rates = Workload(8, LONGEST), Rates(disk_bytes_s, 1e10, 1e15, NOTHING, {"none": {1: flop_s}}, measured=True)
    with open_source(str(folder)) as source:
        nbytes = 4 << 30 if ample else budget_range(source.shape, settings, replace(job, sequences=8))[0] + (1 << 18)
        costs = CostModel(source.shape, rates)
        found = solve(PlanRequest(costs=costs, workload=job, budget=MemoryBudget(nbytes), settings=settings))
    return found.plan


@pytest.mark.parametrize(
    ("family", "machine", "reason"),
    [
        ("qwen3_next", {}, "states of recurrent layers cannot be taken back"),
        ("lfm2", {}, "states of recurrent layers cannot be taken back"),
        ("deepseek_v32", {}, "layers that choose tokens would compute drafted ones like prompts"),
        ("llama", {"ample": True}, "all weights are held"),
        ("llama", {"speculate": "off"}, 'speculate is "off"'),
        ("llama", {"disk_bytes_s": 1e12}, "passes would take longer"),
        # Every token wants experts of its own, which are read.
        ("qwen3_moe", {}, "passes would take longer"),
        ("llama", {}, ""),
    ],
)
def test_plans_say_why_nothing_is_drafted(
    family: str, machine: dict[str, Any], reason: str, checkpoint: Callable[..., Path]
) -> None:
    plan = planned(checkpoint(family), **machine)
    assert plan.undrafted == reason
    assert bool(plan.free_tokens) == (not reason)


def test_free_tokens_end_where_computing_takes_longer_than_bytes(checkpoint: Callable[..., Path]) -> None:
    """The faster the processor, the more; and no pass takes over a 33rd longer."""
    folder = checkpoint("llama")
    plans = [planned(folder, flop_s=flop_s) for flop_s in (1e5, 3e5, 1e9)]
    found = [plan.free_tokens[-1] if plan.free_tokens else plan.max_sequences for plan in plans]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[-1] <= plans[-1].max_sequences * (1 + MOST_DRAFTED)


def test_the_latest_place_of_the_longest_match_is_continued() -> None:
    lookup = Lookup()
    lookup.extend([9, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 2, 3])
    assert lookup.draft(2) == [6, 7]
    lookup.extend([6, 1, 2, 3])
    assert lookup.draft(4) == [6, 7, 8, 2]
    # Bytes that match between tokens are none: 256 is 0, 1, 0, 0.
    across = Lookup()
    across.extend([1 << 8, 1 << 8, 2, 1, 1])
    assert across.draft(5) == []
    # What repeats itself is expected to go on so; a token that nothing follows is no match.
    again = Lookup()
    again.extend([5, 1, 2, 3, 1, 2, 3])
    assert again.draft(5) == [1, 2, 3, 1, 2]
    assert Lookup().draft(3) == []


def test_depth_follows_acceptance_and_misses_are_tried_again_now_and_then() -> None:
    lookup = Lookup()
    lookup.judge(10, 3)
    assert lookup.depth == 4
    lookup.judge(4, 4)
    assert lookup.depth == 8
    lookup.judge(8, 8)
    assert lookup.depth == MOST_DRAFTED
    tried = []
    for each in range(200):
        if not lookup.skips():
            tried.append(each)
            lookup.judge(1, 0)
    assert [after - before for before, after in pairwise(tried)] == [2, 3, 5, 9, 17, 33, 65, 65]
    lookup.judge(1, 1)
    assert (lookup.depth, lookup.skips()) == (2, False)


VOCAB = 6


class MarkovModel:
    """The distribution of a token depends on the one before it; keeps nothing in the cache."""

    def __init__(self) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.table[batch.token_ids[0, batch.logit_rows]]


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_the_distribution_of_sampled_tokens_is_the_model_s(temperature: float) -> None:
    """Chi-square of the tokens behind each token, drafted ones that repeat the prompt or come from the lookup."""
    model = MarkovModel()
    cache = KVCache([KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), 400)])
    engine = Engine(model, Scheduler(PassLimits(512, 64, free_tokens=(400,) * 7), cache), Sampler())
    params = [SequenceSampling(12, temperature=temperature, seed=seed) for seed in range(1500)]
    sequences = [Sequence([1, 2, 3, 1, 2, 4, 0, 5, 3, 3, 2, 0, 1, 2], each) for each in params]
    for sequence in sequences:
        engine.add(sequence)
    list(engine.run())
    assert 700 < engine.metrics.accepted_tokens < 0.8 * engine.metrics.drafted_tokens
    pairs = Counter(pair for each in sequences for pair in pairwise([each.prompt_ids[-1], *each.output_ids]))
    assert pairs.total() == 12 * len(sequences)
    expected = (model.table / temperature).softmax(-1)
    for before in range(VOCAB):
        count = sum(pairs[before, after] for after in range(VOCAB))
        wanted = [count * float(expected[before, after]) for after in range(VOCAB)]
        statistic = sum((pairs[before, after] - each) ** 2 / each for after, each in enumerate(wanted))
        # The 99.9 % quantile with five degrees of freedom.
        assert statistic < 20.5, before


def shifted(batch: Batch) -> Batch:
    """With the positions of drafted tokens one too far."""
    positions = batch.positions.clone()
    for chunk in batch.chunks:
        positions[0, chunk.end - chunk.drafted : chunk.end] += 1
    return replace(batch, positions=positions)


STALE: set[tuple[int, int]] = set()


def remember(cache: KVCache, table: Any, shrink: Any = KVCache.shrink) -> None:
    """Remembers the slots of rejected tokens."""
    for position in range(table.num_tokens, table.num_grown):
        index, offset = divmod(position, cache.block)
        STALE.add((table.blocks[0][index], offset))
    shrink(cache, table)


def keep_stale(pool: KVPool, layer: int, blocks: Any, offsets: Any, k: Any, v: Any, write: Any = KVPool.write) -> None:
    """Leaves what rejected tokens stored where it is, as if it were that of the right tokens."""
    slots = zip(blocks.tolist(), offsets.tolist(), strict=True)
    fresh = torch.tensor([slot not in STALE for slot in slots])
    write(pool, layer, blocks[fresh], offsets[fresh], k[: len(fresh)][fresh], v[: len(fresh)][fresh])


def counted_early(scheduler: Scheduler, draft: Any, speculate: Any = Scheduler._speculate) -> None:
    speculate(scheduler, draft)
    for sequence in draft.chosen:
        for token_id in sequence.drafted if sequence.history is not None else ():
            sequence.history.append(token_id)


def never_ending(sequences: Any, samples: Any, append: Any = scheduler_module._append) -> None:
    append(sequences, samples)
    for each in sequences:
        if each.lookup.__len__() and each.drafted[1:] and each.finish_reason == "stop":
            each.status = SequenceStatus.RUNNING


def late_number(self: Engine, samples: Any, sequences: Any, rows: Any, behind: Any = Engine._draw_behind) -> Any:
    """Draws from the numbers of the positions before."""
    draw = engine_module._draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_draw", lambda each: replace(draw(each), position=len(each.output_ids) - 1))
        return behind(self, samples, sequences, rows)


def wrong_row(self: Engine, samples: Any, sequences: Any, rows: Any, behind: Any = Engine._draw_behind) -> Any:
    return behind(self, samples, sequences, [max(0, row - 1) for row in rows])


BUGS: dict[str, tuple[Any, ...]] = {
    "one token too many is accepted": (
        scheduler_module,
        "_follows",
        lambda each, accepted, follows=scheduler_module._follows: follows(each, accepted)
        or (not each.finished and accepted == 0 and len(each.drafted) > 1),
    ),
    "keys and values of rejected tokens stay": (KVCache, "shrink", remember, KVPool, "write", keep_stale),
    "positions are off by one": (
        scheduler_module, "pack", lambda chosen, pack=scheduler_module.pack: shifted(pack(chosen)),
    ),
    "penalties count drafted tokens": (Scheduler, "_speculate", counted_early),
    "a stop token within a run of accepted ones ends nothing": (scheduler_module, "_append", never_ending),
    "random numbers are those of another position": (Engine, "_draw_behind", late_number),
    "tokens are drawn from another row": (Engine, "_draw_behind", wrong_row),
    "blocks of rejected tokens are kept": (KVCache, "shrink", lambda cache, table: None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trial of `test_drafted_tokens_show_in_no_bit[plain-qwen3_moe]`, which passes without it."""
    with open_source(str(checkpoint("qwen3_moe", num_hidden_layers=2))) as source:
        STALE.clear()
        for first in range(0, len(BUGS[bug]), 3):
            monkeypatch.setattr(*BUGS[bug][first : first + 3])
        with pytest.raises((AssertionError, ValueError, IndexError)) as found:
            trial(source, WAYS["plain"])
    print(bug, "->", str(found.value).splitlines()[0][:100])
