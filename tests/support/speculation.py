"""Rows of every kind, and the ways in which they are run, whoever drafts tokens (test_speculation.py, test_mtp.py)."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Batch, Sequence
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource
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


def run(
    source: ModelSource,
    way: Way,
    sequences: list[Sequence],
    free: tuple[int, ...],
    store: Path | None,
    begun: Callable[[Engine], None] = lambda engine: None,
    passed: Callable[[Engine], None] = lambda engine: None,
) -> Engine:
    """Runs all sequences; `begun` gets the engine before the first pass, `passed` behind each."""
    plan = replace(plan_for(source, way), free_tokens=free, undrafted="")
    with closing(load_engine(source, plan, store if way.smallest else None)) as loaded:
        engine: Engine = loaded.engine
        if way.halves:
            give_out(engine)
        for sequence in sequences:
            engine.add(sequence)
        begun(engine)
        while engine.busy:
            engine.step()
            passed(engine)
            for each in engine.scheduler.running:
                for group, blocks in zip(engine.scheduler.cache.groups, each.table.blocks, strict=True):
                    assert len(blocks) == group.spec.blocks_for(each.table.num_tokens), "blocks leaked"
        assert all(group.allocator.num_live == 0 for group in engine.scheduler.cache.groups)
    return engine
