"""Memory gives out at a chosen allocation of a device, of a pass (`runtime/engine/engine.py`) or of loading
(`runtime/loading/engine_loader.py`): the job goes on, with the same tokens.

Cases M5 and M6 of the failure table.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.moe.streaming_mode import Mode
from moedge.runtime.engine import engine as engine_module
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine, load_with_fallback
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.fallback import Fallback, FallbackPolicy
from moedge.runtime.plan.placement import Plan
from moedge.runtime.plan.planner import PlanRequest
from moedge.runtime.settings.errors import MemoryGaveOut
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget

ALL = Mode.ALL
GAVE_OUT = "CUDA out of memory, as told"


class Refusals:
    """Counts a fake device's allocations while `counting`, and refuses those of which `refused` says so."""

    def __init__(self, fake: Any, refused: Callable[[int], bool]) -> None:
        self.counting = False
        self.num_counted = self.num_refused = 0
        take = fake.cuda.take

        def refusing(nbytes: int) -> Any:
            if self.counting:
                self.num_counted += 1
                if refused(self.num_counted):
                    self.num_refused += 1
                    raise torch.OutOfMemoryError(GAVE_OUT)
            return take(nbytes)

        fake.cuda.take = refusing

    @contextmanager
    def counted(self, wanted: bool) -> Iterator[None]:
        self.counting = wanted
        try:
            yield
        finally:
            self.counting = False


@dataclass
class Ended:
    tokens: list[list[int]]
    applied: list[Fallback]
    plan: Plan
    allocations: int
    refused: int


def run(
    case: Any,
    fake: Any,
    plan: Plan,
    *,
    loading: bool = False,
    refused: Callable[[int], bool] = lambda _: False,
    stream: Mode = ALL,
) -> Ended:
    """Allocations of passes count, or those of `loading`."""
    refusals = Refusals(fake, refused)
    granted = DeviceBudget(plan.budget.device.nbytes, fake.device.context_nbytes, 0) if plan.staging else None
    budget = MemoryBudget(plan.budget.host_nbytes, granted)
    request = PlanRequest(costs=CostModel(case.source.shape), workload=case.job, budget=budget)
    policy = FallbackPolicy(plan, request)

    def load(lesser: Plan) -> LoadedEngine:
        store = case.store if lesser.streams else None
        with refusals.counted(loading):
            return load_engine(case.source, lesser, store, fake.device, stream)

    with fake, closing(load_with_fallback(load, policy)) as loaded:
        sequences = [Sequence(ids, case.params(index, 0.0)) for index, ids in enumerate(case.prompts)]
        for sequence in sequences:
            loaded.engine.add(sequence)
        with refusals.counted(not loading):
            list(loaded.engine.run())
        assert not loaded.engine.busy
    tokens = [sequence.output_ids for sequence in sequences]
    return Ended(tokens, policy.applied, policy.plan, refusals.num_counted, refusals.num_refused)


PLANS: dict[str, tuple[Callable[[Any, Any], Plan], Mode]] = {
    "staged": (lambda case, device: case.plan(device, 0.0), ALL),
    "half held, wanted": (lambda case, device: case.plan(device, 0.5), Mode.WANTED),
    "from disk": (lambda case, device: case.three_tiers(device), Mode.FORECAST),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "moment"), [("staged", 1), ("staged", 150), ("half held, wanted", 90), ("from disk", 60)]
)
def test_m6_wherever_a_pass_fails_its_rows_run_again_in_halves(
    name: str, moment: int, case: Any, fakes: ModuleType
) -> None:
    make, stream = PLANS[name]
    tiny, fake = replace(case("qwen3_moe"), lengths=(3, 20, 9), new_tokens=3), fakes.FakeDevice(seed=moment)
    ended = run(tiny, fake, make(tiny, fake.device), refused=lambda number: number == moment, stream=stream)
    assert ended.refused == 1
    assert ended.tokens == tiny.run(tiny.plan(None)).tokens
    (fallback,) = ended.applied
    assert fallback.what == "tokens of a pass"
    assert fallback.after == fallback.before // 2 == ended.plan.tokens_per_pass
    assert GAVE_OUT in str(fallback)


@pytest.mark.slow
def test_m6_a_pass_that_fails_again_and_again_is_halved_until_it_fits(case: Any, fakes: ModuleType) -> None:
    tiny, fake = case("qwen3_moe"), fakes.FakeDevice()
    ended = run(tiny, fake, tiny.plan(fake.device, 0.8), refused=lambda number: number <= 3)
    assert ended.tokens == tiny.run(tiny.plan(None)).tokens
    assert [each.after for each in ended.applied] == [each.before // 2 for each in ended.applied]
    assert len(ended.applied) == 3


def test_m6_where_nothing_is_left_the_refusal_names_the_smallest_budget(case: Any, fakes: ModuleType) -> None:
    tiny, fake = case("qwen3_moe"), fakes.FakeDevice()
    with pytest.raises(MemoryGaveOut, match=r"no fallback is left\. .* --gpu-mem \d+MiB.*resumes the job"):
        run(tiny, fake, tiny.plan(fake.device, 0.0), refused=lambda _: True)


def test_m6_a_replay_that_loses_the_first_half_is_caught(
    case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    halves = engine_module.halves
    monkeypatch.setattr(engine_module, "halves", lambda batch: halves(batch)[::-1])
    tiny, fake = case("qwen3_moe"), fakes.FakeDevice()
    ended = run(tiny, fake, tiny.plan(fake.device, 0.8), refused=lambda number: number == 9)
    assert ended.tokens != tiny.run(tiny.plan(None)).tokens


@pytest.mark.slow
def test_m5_wherever_loading_fails_it_begins_anew_with_less(case: Any, fakes: ModuleType) -> None:
    """Held weights, rings, cache and what else is allocated, each once."""
    tiny = case("qwen3_moe")
    wanted = tiny.run(tiny.plan(None)).tokens
    fake = fakes.FakeDevice()
    allocations = run(tiny, fake, tiny.plan(fake.device, 0.5), loading=True).allocations
    for moment in range(1, allocations + 1, max(1, allocations // 3)):
        fake = fakes.FakeDevice(seed=moment)
        plan = tiny.plan(fake.device, 0.5)
        ended = run(tiny, fake, plan, loading=True, refused=lambda number, at=moment: number == at)
        assert (ended.tokens, ended.refused, len(ended.applied)) == (wanted, 1, 1)
        assert ended.plan.used_nbytes < plan.used_nbytes
        assert not fake.cuda.registered, "what failed to load left something pinned"
