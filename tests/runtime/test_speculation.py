"""Drafted tokens (`runtime/engine/lookup.py`) never show in what is generated, but in the number of passes.

Whoever drafts here knows the answer and errs on purpose (support/oracle.py), so that drafts are accepted, rejected and
cut in every way; counters show it. Each planted bug is found by the trial that is named beside it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
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
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.source.model_source import ModelSource, open_source
from support.oracle import foresee
from support.speculation import FREE, LONGEST, NEW_TOKENS, WAYS, Way, everyone, rows, run


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


class Bounded:
    """Parts of an answer whose first one ends with a token that is forced, wherever a pass has got to by then."""

    masked, begin_id = True, None

    def __init__(self, sequence: Sequence, length: int) -> None:
        self._sequence, self._length = sequence, length

    @property
    def forced(self) -> int | None:
        return VOCAB - 1 if len(self._sequence.output_ids) == self._length else None


def unforced(self: Engine, samples: Any, sequences: Any, rows: Any, behind: Any = Engine._draw_behind) -> Any:
    """Behind drafted tokens nothing is forced."""
    draw = engine_module._draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_draw", lambda each: replace(draw(each), forced=None))
        return behind(self, samples, sequences, rows)


@pytest.mark.parametrize("bug", [False, True], ids=["", "nothing is forced behind drafted tokens"])
def test_what_is_forced_is_forced_behind_drafted_tokens(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As thinking is that has a bound; drafts go on as if it had none."""

    def run(free: tuple[int, ...], wanted: list[list[int]], bounded: bool) -> tuple[list[list[int]], Engine]:
        cache = KVCache([KVPool(KVSpec(KVGroup((0,), 1, 2, None), "fp32", 16), 400)])
        engine = Engine(MarkovModel(), Scheduler(PassLimits(512, 64, free_tokens=free), cache), Sampler())
        params = [SequenceSampling(12, temperature=0.9, seed=seed) for seed in range(40)]
        sequences = [Sequence([1, 2, 3], each) for each in params]
        for seed, sequence in enumerate(sequences):
            sequence.parts = Bounded(sequence, 4 + seed % 3) if bounded else None
            if wanted:
                foresee(sequence, wanted[seed], 9, seed)
            engine.add(sequence)
        list(engine.run())
        return [each.output_ids for each in sequences], engine

    unbounded, _ = run((), [], bounded=False)
    plain, _ = run((), [], bounded=True)
    assert plain != unbounded
    if bug:
        monkeypatch.setattr(Engine, "_draw_behind", unforced)
    ours, engine = run((400,) * 7, unbounded, bounded=True)
    assert engine.metrics.accepted_tokens > 100
    assert (ours == plain) == (not bug)
    assert all(each[4 + seed % 3] == VOCAB - 1 for seed, each in enumerate(plain))


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
