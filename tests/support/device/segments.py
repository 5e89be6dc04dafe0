"""Jobs of passes of mixed shapes on a fake device: what torch's allocator reserves for them after the rehearsal, and
bugs by which that is more.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moedge.runtime.attention.torch_backend import CacheReader
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs import lifecycle
from moedge.runtime.model.runner import ModelRunner
from moedge.runtime.plan.candidate import SLACK_NBYTES
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Plan
from moedge.runtime.plan.planner import PlanRequest, PlanResult
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.text.tokenizer import Tokenizer
from support.device import fake_allocator as allocators
from support.device import tiny_engine

# A tiny model's tensors are to these segments what a published one's are to torch's.
SCALE = 1 << 10
# What plans set aside for allocators, beside a share of activations.
SLACK = SLACK_NBYTES // SCALE
PASSES = 50


@dataclass(frozen=True)
class Reserved:
    """Bytes that the allocator took in passes after the rehearsal, and how often; by how many bytes more were in use
    behind the last pass than when a fifth of them had run; how many passes there were, and of how many kinds: with
    prompts that begin, with chunks that go on, with decoding rows, and sequences of each.
    """

    grown: int
    segments: int
    left: int
    passes: int
    kinds: set[tuple[int, int, int]]


def small_segments(patch: pytest.MonkeyPatch) -> None:
    """Devices that are made from now on have segments of 2 and 20 KiB."""
    for name in ("SMALL", "LARGE", "SMALL_SEGMENT", "LARGE_SEGMENT"):
        patch.setattr(allocators, name, getattr(allocators, name) // SCALE)


def mixed(tiny: tiny_engine.Case, seed: int) -> Iterator[Sequence]:
    """Sequences without end: prompts of a token up to the longest, every fifth of these, greedy and drawn."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return 1 + int(torch.randint(most, (), generator=generator))

    while True:
        length = tiny.job.longest - 1 if drawn(5) == 1 else drawn(tiny.job.longest - 1)
        params = tiny.params(seed := seed + 1, float(drawn(2) - 1))
        new = min(drawn(tiny.new_tokens), tiny.job.longest - length)
        yield Sequence([4 + drawn(370) for _ in range(length)], replace(params, max_tokens=new))


def run(tiny: tiny_engine.Case, fake: Any, plan: Plan, seed: int = 0, passes: int = PASSES) -> Reserved:
    """A job from its plan on: loaded, rehearsed, then passes, to which a sequence comes every other time."""
    request = PlanRequest(
        costs=CostModel(tiny.source.shape), workload=tiny.job, budget=plan.budget, settings=tiny.settings
    )
    device, allocator, kinds = plan.budget.device, fake.cuda.allocator, set()
    assert device is not None
    fake.device.limit(device.nbytes - device.context_nbytes)
    with Tokenizer.load(tiny.source.folder) as tokenizer:
        loaded = lifecycle.load_model(
            tiny.source, tokenizer, (fake.device, PlanResult.of(plan, {}, request)), Budgets()
        )
        with closing(loaded.engine):
            lifecycle.profile_model(loaded, tiny.job)
            engine, rehearsed, segments = loaded.engine.engine, allocator.reserved, 0
            compute = engine.split_retry._compute

            def counting(batch: Any) -> Any:
                pasts = [(chunk.past, chunk.count) for chunk in batch.chunks]
                begun, going = (sum(bool(past) == is_on and count > 1 for past, count in pasts) for is_on in (0, 1))
                kinds.add((begun, going, len(pasts) - begun - going))
                return compute(batch)

            engine.split_retry._compute = counting
            coming, settled = mixed(tiny, seed), 0
            for number in range(passes):
                if number % 2 == 0 or not engine.busy:
                    engine.add(next(coming))
                before = allocator.reserved
                engine.step()
                segments += allocator.reserved > before
                settled = allocator.allocated if number == passes // 5 else settled
            return Reserved(allocator.reserved - rehearsed, segments, allocator.allocated - settled, passes, kinds)


Patch = pytest.MonkeyPatch


def _not_rehearsed(patch: Patch) -> None:
    """No pass is rehearsed at the end of the longest sequences."""
    patch.setattr(lifecycle, "_run_late", lambda *_: 0)


def _short_prompts(patch: Patch) -> None:
    """What is rehearsed attends to no more than a chunk."""
    patch.setattr(lifecycle, "_skip", lambda *_: None)


def _scratch_that_grows(patch: Patch) -> None:
    """The scratch of attention is allocated anew where sequences are longer than before, and kept."""
    take = CacheReader._take

    def kept(self: Any, length: int, group: Any) -> Any:
        numel = group.kv_heads * length * (group.head_dim + group.value_dim)
        if self._scratch.numel() < numel:
            self._scratch = self._scratch.new_empty(numel)
        return take(self, length, group)

    patch.setattr(CacheReader, "_take", kept)


def _never_given_back(patch: Patch) -> None:
    """Every pass leaves a copy of its logits behind."""
    forward, left = ModelRunner.forward, []

    def leaving(self: ModelRunner, batch: Any) -> torch.Tensor:
        logits = forward(self, batch)
        left.append(logits.clone())
        return logits

    patch.setattr(ModelRunner, "forward", leaving)


BUGS: dict[str, Callable[[Patch], None]] = {
    "late passes not rehearsed": _not_rehearsed,
    "short prompts rehearsed": _short_prompts,
    "scratch that grows": _scratch_that_grows,
    "never given back": _never_given_back,
}
