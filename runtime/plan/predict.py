"""How long a job takes under a plan, and what it waits for. Closed form over a few kinds of passes, torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from ..kv.spec import KVSpec
from .pass_cost import ModelWork, PassCost, PassCosts, PassLoad
from .plan import Plan, Workload
from .rates import Rates

RESOURCES = ("disk", "link", "compute")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of the whole job, without loading. `busy_s` is by resource, and so are factors; `binds` is what it waits for.

    Answers are taken to be as long as they may be, and no prompt to begin like another.
    """

    seconds: float
    prompt_tok_s: float
    generated_tok_s: float
    passes: float
    sequences: float
    binds: str
    busy_s: Mapping[str, float]
    disk_nbytes: float
    link_nbytes: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Phase:
    """`passes` alike."""

    passes: float
    load: PassLoad


def predict(
    model: ModelWork,
    plan: Plan,
    job: Workload,
    rates: Rates,
    factors: Mapping[str, float] = MappingProxyType({}),
) -> Prediction:
    """`factors` multiply the seconds of resources, as earlier runs taught (history.py)."""
    costs = PassCosts(model, plan, rates)
    specs = tuple(KVSpec(group, plan.kv, plan.kv_block) for group in model.shape.kv_groups)
    live = live_sequences(specs, plan.kv_blocks, min(plan.max_sequences, plan.tokens_per_pass), job)
    phases = list(phases_of(job, live, plan.tokens_per_pass))
    costed = [(phase.passes, costs.cost(phase.load)) for phase in phases]
    busy = {name: sum(passes * _seconds(cost, name, factors) for passes, cost in costed) for name in RESOURCES}
    total = sum(passes * _pass_seconds(cost, factors) for passes, cost in costed)
    waited = {name: sum(passes for passes, cost in costed if _binding(cost, factors) == name) for name in RESOURCES}
    generated = job.mean_generated * job.sequences
    return Prediction(
        seconds=total,
        prompt_tok_s=job.mean_prompt * job.sequences / total,
        generated_tok_s=generated / total,
        passes=sum(passes for passes, _ in costed),
        sequences=live,
        binds=max(RESOURCES, key=lambda name: (waited[name], busy[name])),
        busy_s=busy,
        disk_nbytes=sum(passes * cost.disk_nbytes for passes, cost in costed),
        link_nbytes=sum(passes * cost.link_nbytes for passes, cost in costed),
    )


def live_sequences(specs: Sequence[KVSpec], blocks: Sequence[int], most: int, job: Workload) -> float:
    """Sequences that run together: as many as a pass takes at `most` and the cache's blocks allow, of mean length."""
    tokens = max(1, round(job.mean_prompt + job.mean_generated))
    rooms = [count / spec.least_blocks(tokens) for spec, count in zip(specs, blocks, strict=True)]
    return max(1.0, min(most, job.sequences, *rooms))


def phases_of(job: Workload, live: float, tokens_per_pass: int) -> Iterator[Phase]:
    """A job as rounds of `live` sequences: passes with prompts in them, then passes that only decode.

    The last round may have fewer sequences. While the first one begins, and when at the end none is admitted any more,
    half of the sequences decode in the mean.
    """
    rounds = max(1, int(job.sequences / live))
    rest = job.sequences - rounds * live
    yield from _round(job, live, tokens_per_pass, 1, beginning=True)
    if rounds > 1:
        yield from _round(job, live, tokens_per_pass, rounds - 1)
    if rest >= 1:
        yield from _round(job, rest, tokens_per_pass, 1)
    last = rest if rest >= 1 else live
    ending = min(_passes_with_prompts(job, last, tokens_per_pass), job.mean_generated)
    yield Phase(ending, _decoding(job, max(1.0, last / 2)))


def _round(job: Workload, live: float, tokens_per_pass: int, times: int, beginning: bool = False) -> Iterator[Phase]:
    filling = _passes_with_prompts(job, live, tokens_per_pass)
    decoding = max(0.0, job.mean_generated - filling)
    riding = live * (job.mean_generated - decoding) / filling * (0.5 if beginning else 1.0)
    prompts = live * job.mean_prompt / filling
    chunk, back = min(job.mean_prompt, prompts), job.mean_prompt / 2
    load = PassLoad(riding, prompts, chunk, live / filling, _looked_at(job), back)
    yield Phase(times * filling, load)
    if decoding:
        yield Phase(times * decoding, _decoding(job, live))


def _passes_with_prompts(job: Workload, live: float, tokens_per_pass: int) -> float:
    """Of one round. They are full; where prompts are long, all passes are, and a round outlasts an answer."""
    prompts, free = job.mean_prompt * live, tokens_per_pass - live
    if prompts <= job.mean_generated * free:
        return max(1.0, prompts / free)
    return (prompts + job.mean_generated * live) / tokens_per_pass


def _decoding(job: Workload, live: float) -> PassLoad:
    return PassLoad(live, 0.0, 1.0, 0.0, _looked_at(job), 0.0)


def _looked_at(job: Workload) -> float:
    return job.mean_prompt + job.mean_generated / 2


def _seconds(cost: PassCost, name: str, factors: Mapping[str, float]) -> float:
    seconds = {"disk": cost.disk_s, "link": cost.link_s, "compute": cost.compute_s}[name]
    return seconds * factors.get(name, 1.0)


def _pass_seconds(cost: PassCost, factors: Mapping[str, float]) -> float:
    seconds = {name: _seconds(cost, name, factors) for name in RESOURCES}
    return max(seconds.values()) + cost.unhidden * min(seconds["disk"], seconds["compute"])


def _binding(cost: PassCost, factors: Mapping[str, float]) -> str:
    return max(RESOURCES, key=lambda name: _seconds(cost, name, factors))
