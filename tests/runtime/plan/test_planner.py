"""The planner's promises: feasible from the reported minimum on, never slower with more, user's values kept."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.offload.machine.profile import Overheads
from moedge.runtime.plan import candidate, planner
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import (
    WORTH,
    WORTH_STREAMING,
    PlanRequest,
    PlanResult,
    budget_range,
    refuse_too_small,
    solve,
)
from moedge.runtime.plan.rates import Rates
from moedge.runtime.settings.errors import DoesNotFit, SettingError
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape
from moedge.runtime.shape.shards import model_shards, resident_nbytes, weights_nbytes
from support.known_shapes import CONFIGS, LATENT_CONFIGS, choose, known_shape, plain_model, published_shape

GIB, MIB = 1 << 30, 1 << 20
FAST = Rates(
    2e9, 2e10, 3e10, Overheads(2e-3, 6e-5, 1e-4, 5e-5, 3e-4, 1e-12),
    {
        "none": {1: 2e10, 256: 2e12}, "int8": {1: 3e10, 256: 1e12},
        "int4": {1: 6e10, 256: 6e11}, "nf4": {1: 9e9, 256: 1e12},
    },
    measured=True,
)  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """Small dense and mixed models, with and without windows, tied or not."""
    hidden, num_layers = 64 * draw(st.integers(1, 8)), draw(st.integers(1, 6))
    heads = draw(st.sampled_from([1, 2, 4]))
    dense = (
        Matrix("q_proj", 256, hidden),
        Matrix("o_proj", hidden, 256),
        Matrix("mlp", 64 * draw(st.integers(1, 9)), hidden),
    )
    count = draw(st.sampled_from([0, 4, 8, 60]))
    inner = 64 * draw(st.integers(1, 8))
    experts = ExpertsShape(
        count, draw(st.integers(1, 4)), Matrix("up", 2 * inner, hidden), Matrix("down", hidden, inner)
    )
    with_experts = range(draw(st.integers(0, num_layers)), num_layers) if count else range(0)
    layers = tuple(
        LayerShape(index, dense, experts if index in with_experts else None, 100) for index in range(num_layers)
    )
    window = draw(st.sampled_from([None, 16, 128]))
    cut = draw(st.integers(1, num_layers))
    parts = [tuple(range(cut)), tuple(range(cut, num_layers))]
    groups = tuple(KVGroup(part, heads, 64, each) for part, each in zip(parts, (None, window), strict=True) if part)
    head = draw(st.sampled_from([None, Matrix("lm_head", 512, hidden)]))
    return ModelShape("any", draw(st.sampled_from(["bf16", "fp32"])), hidden, 512, 4096, layers, groups, head, hidden)


SETTINGS = st.builds(
    Settings,
    quant=st.sampled_from(["none", "int8", "nf4"]),
    kv=st.sampled_from(["bf16", "int8"]),
    max_sequences=st.sampled_from([None, 1, 7, 40]),
    deterministic=st.booleans(),
)


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    rows, prompt, output = draw(st.integers(1, 300)), draw(st.integers(1, 600)), draw(st.integers(1, 300))
    return Workload(rows, prompt + output, prompt + output, rows * prompt, rows * output)


ROOM = DeviceBudget(0, 100 * MIB, 300 * MIB)
AMPLE = 1 << 40


def attempt(shape: ModelShape, wanted: Settings, job: Workload, tier: str, budget: int) -> PlanResult:
    if tier == "host":
        return choose(shape, wanted, MemoryBudget(budget), job, FAST)
    return choose(shape, wanted, MemoryBudget(AMPLE, replace(ROOM, nbytes=budget)), job, FAST)


@pytest.mark.sample("25-device")
@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("examples", [25, 100])
def test_a_plan_fits_exactly_from_its_minimum_on_and_more_memory_is_never_slower(examples: int, tier: str) -> None:
    """Two budgets for every shape."""

    @given(models(), SETTINGS, jobs(), st.floats(0, 1), st.floats(0, 1))
    @settings(max_examples=examples, deadline=None, derandomize=True)
    def hold(shape: ModelShape, wanted: Settings, job: Workload, share: float, more: float) -> None:
        smallest, whole = budget_range(shape, wanted, job, ROOM if tier == "device" else None)
        with pytest.raises(DoesNotFit, match=f"{-(-smallest // MIB)}MiB"):
            attempt(shape, wanted, job, tier, smallest - 1)
        lower = smallest + int(share * (whole - smallest))
        higher = lower + int(more * 1.2 * (whole - smallest)) + 1
        before, after = attempt(shape, wanted, job, tier, lower), attempt(shape, wanted, job, tier, higher)
        for choice, budget in ((before, lower), (after, higher)):
            assert choice.plan.used_nbytes <= budget
            assert choice.plan.kv_tokens >= job.longest
        # Loading and generating together decide: what generates no faster loads in less time, or holds all weights,
        # which may take a little longer than streaming some.
        loads_faster = after.prediction.total_s < before.prediction.total_s
        streamed = [bool(choice.plan.placement.ring_nbytes) for choice in (before, after)]
        worth = WORTH_STREAMING if streamed == [True, False] else 1
        assert loads_faster or after.prediction.seconds <= before.prediction.seconds * worth * (1 + 1e-9)

    hold()


@pytest.mark.sample("25")
@pytest.mark.parametrize("examples", [25, 100])
def test_the_disk_fits_exactly_from_its_minimum_on_and_more_of_it_is_never_slower(examples: int) -> None:
    """Two budgets of disk for every shape and budget of memory."""

    @given(models(), SETTINGS, jobs(), st.floats(0, 1), st.floats(0, 1.5), st.floats(0, 1.5))
    @settings(max_examples=examples, deadline=None, derandomize=True)
    def hold(shape: ModelShape, wanted: Settings, job: Workload, share: float, some: float, other: float) -> None:
        smallest, whole = budget_range(shape, wanted, job)
        host = smallest + int(share * (whole - smallest))
        store = weights_nbytes(shape, wanted.quant, shape.dtype)

        def seconds(disk: int) -> float | None:
            try:
                choice = choose(shape, wanted, MemoryBudget(host, None, disk), job, FAST)
            except DoesNotFit as refused:
                refusal = str(refused)
            else:
                refusal = ""
            if refusal:
                assert f"give --disk {-(-store // MIB)}MiB" in refusal
                return None
            assert disk >= store or not choice.plan.streams
            return choice.prediction.seconds

        # Without any, weights must have room in memory.
        minimum = 0 if seconds(0) is not None else store
        if minimum:
            assert seconds(minimum - 1) is None
        lower, higher = sorted(int(each * store) for each in (some, other))
        before, after = seconds(lower), seconds(higher)
        assert (before is not None, after is not None) == (lower >= minimum, higher >= minimum)
        if before is not None and after is not None:
            assert after <= before * (1 + 1e-9)

    hold()


# Which format is taken is asked of the seconds of each, whatever passes they are of.
@pytest.mark.sample("few passes")
@pytest.mark.parametrize(
    "passes", [{"tokens_per_pass": 256, "max_sequences": 64}, {}], ids=["few passes", "all passes"]
)
def test_the_least_lossy_format_within_one_and_a_half_times_the_fastest_is_taken(passes: dict[str, int]) -> None:
    shape, job, wanted = plain_model(), Workload(1000, 256, 256, 128_000, 128_000), Settings(**passes)  # type: ignore[arg-type]
    taken = []
    for budget in range(2 * GIB, 10 * GIB, 2 * GIB):
        choice = choose(shape, wanted, MemoryBudget(budget), job, FAST)
        fastest = min(choice.seconds.values())
        lossless_first = list(choice.seconds)
        worth = [quant for quant in lossless_first if choice.seconds[quant] <= WORTH * fastest]
        assert choice.plan.quant == worth[0]
        taken.append(choice.plan.quant)
    whole = choose(shape, wanted, MemoryBudget(64 * GIB), job, FAST)
    assert (whole.plan.quant, list(whole.seconds)) == ("none", ["none"]), "all fits: no other format is considered"
    assert taken[0] != "none"


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"quant": "int8"}, ("quant", "int8")),
        ({"kv": "int4"}, ("kv", "int4")),
        ({"dtype": "fp32"}, ("dtype", "fp32")),
        ({"tokens_per_pass": 77}, ("tokens_per_pass", 77)),
        ({"deterministic": True}, ("deterministic", True)),
        ({"compute": "int8"}, ("compute", "int8")),
        ({"compute": "float", "quant": "int4"}, ("compute", "float")),
        ({"attention": "torch"}, ("attention", "torch")),
    ],
)
def test_what_the_user_sets_is_a_fixed_point(changed: dict[str, object], kept: tuple[str, object]) -> None:
    job = Workload(300, 300, 300, 30_000, 60_000)
    wanted = Settings(**{"max_sequences": 40, **changed})  # type: ignore[arg-type]
    plan = choose(plain_model(), wanted, MemoryBudget(3 * GIB), job, FAST).plan
    assert getattr(plan, kept[0]) == kept[1]


@pytest.mark.parametrize("limit", [1, 5, 60])
def test_no_more_sequences_than_the_user_allows(limit: int) -> None:
    job = Workload(300, 300, 300, 30_000, 60_000)
    assert (
        choose(plain_model(), Settings(max_sequences=limit), MemoryBudget(8 * GIB), job, FAST).plan.max_sequences
        <= limit
    )


@pytest.mark.parametrize("name", ["tokens_per_pass", "max_sequences"])
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=name.replace("_", "-")):
        choose(plain_model(), Settings(**{name: 0}), MemoryBudget(64 * GIB), Workload(1, 10))  # type: ignore[arg-type]


def test_an_embedding_takes_memory_only_beside_all_weights() -> None:
    """593 MiB of Qwen3-30B-A3B, whose rows are looked up on the disk where experts stream; not of a tied head."""
    wanted, job = Settings(quant="int4", kv="bf16", max_sequences=1, tokens_per_pass=16), Workload(1, 64)
    shape = published_shape("Qwen3-30B-A3B")
    embedding = 151_936 * 2048 * 2
    smallest, whole = budget_range(shape, wanted, job)
    budgets = whole, whole - 1, smallest
    held, streamed, least = (choose(shape, wanted, MemoryBudget(each), job, FAST).plan for each in budgets)
    assert not held.streams
    assert streamed.streams
    assert least.streams
    assert held.resident_nbytes - embedding == streamed.resident_nbytes == least.resident_nbytes
    # All is held but what the ring takes.
    expert = max(model_shards(shape, "int4", "bf16").expert_nbytes)
    assert held.weights_nbytes - streamed.held_nbytes < streamed.placement.ring_nbytes + 2 * expert
    assert least.used_nbytes <= smallest
    # A head that is the embedding, in bf16, multiplies by all rows.
    tied, wanted = replace(shape, head=None), replace(wanted, quant="none")
    plans = [choose(tied, wanted, MemoryBudget(each), job, FAST).plan for each in budget_range(tied, wanted, job)]
    assert [plan.streams for plan in plans] == [True, False]
    assert [plan.resident_nbytes for plan in plans] == [resident_nbytes(tied, "bf16")] * 2


def test_a_cache_that_is_small_beside_the_memory_keeps_the_models_dtype() -> None:
    """Qwen3-30B-A3B in 6 GiB: 96 KiB a token in bf16; half of it is a 2,000th of the weights with one short sequence,
    and several hundred experts with many."""
    shape, wanted = published_shape("Qwen3-30B-A3B"), Settings(quant="int4")
    few, many = Workload(1, 64), Workload(1000, 512)
    plans = {job: choose(shape, wanted, MemoryBudget(6 * GIB), job, FAST).plan for job in (few, many)}
    assert {job: plan.kv for job, plan in plans.items()} == {few: "bf16", many: "int8"}
    assert all(plan.streams for plan in plans.values())
    assert plans[few].kv_nbytes <= planner.LITTLE_KV * 6 * GIB
    # Where only int8 fits, it is taken, however small the cache.
    least, _ = budget_range(shape, wanted, few)
    assert choose(shape, wanted, MemoryBudget(least), few, FAST).plan.kv == "int8"


def test_memory_is_used_where_it_helps() -> None:
    """At most a tenth of a budget is idle as long as some weights stream."""
    job = Workload(2000, 256, 256, 256_000, 256_000)
    for budget in range(2 * GIB, 8 * GIB, GIB // 2):
        plan = choose(plain_model(), Settings(quant="none"), MemoryBudget(budget), job, FAST).plan
        assert plan.streams
        assert plan.used_nbytes >= 0.9 * budget


@contextmanager
def bound(changed: Callable[[float], float]) -> Iterator[None]:
    least = CostModel.least_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "least_seconds", lambda *arguments: changed(least(*arguments)))
        yield


@pytest.mark.parametrize("tier", ["host", "device", "device and disk"])
@given(models(), SETTINGS, jobs(), st.floats(0, 1.2), st.floats(0, 1))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_choice_is_that_of_the_exhaustive_search(
    tier: str, shape: ModelShape, wanted: Settings, job: Workload, share: float, staged: float
) -> None:
    room = None if tier == "host" else ROOM
    smallest, whole = budget_range(shape, wanted, job, room)
    budget = smallest + int(share * (whole - smallest))
    # From the smallest that no model is refused.
    host = AMPLE if tier == "device" else 900 * MIB + int(staged * (whole - smallest))

    def answer() -> PlanResult:
        if room is None:
            return choose(shape, wanted, MemoryBudget(budget), job, FAST)
        return choose(shape, wanted, MemoryBudget(host, replace(room, nbytes=budget)), job, FAST)

    pruned = answer()
    with bound(lambda _: 0.0):
        assert answer() == pruned


def test_a_bound_that_is_too_high_is_caught() -> None:
    """The control of the test above: with a bound that is none, other plans are taken."""
    job, wanted = Workload(1000, 768, 768, 512_000, 256_000), Settings(quant="none")

    def differs(budget: int) -> bool:
        right = choose(plain_model(), wanted, MemoryBudget(budget), job, FAST)
        with bound(lambda least: 1e9 / least):
            return choose(plain_model(), wanted, MemoryBudget(budget), job, FAST) != right

    assert any(differs(budget) for budget in range(2 * GIB, 10 * GIB, GIB))


def test_few_candidates_are_placed_and_a_format_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"placed": 0, "packed": 0, "candidates": 0}

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(planner, "choose_placement", counted("placed", planner.choose_placement))
    monkeypatch.setattr(candidate, "model_shards", counted("packed", candidate.model_shards))
    monkeypatch.setattr(CostModel, "least_seconds", counted("candidates", CostModel.least_seconds))
    costs, job = CostModel(known_shape("gpt-oss-120b"), FAST), Workload(1000, 768, 768, 512_000, 256_000)
    for budget in (12, 20, 40):
        solve(PlanRequest(costs=costs, workload=job, budget=MemoryBudget(budget * GIB)))
    assert counts["packed"] == 4
    assert counts["candidates"] > 1000
    assert counts["placed"] < counts["candidates"] / 10


@given(models(), SETTINGS, jobs(), st.sampled_from(["host", "device"]))
@settings(max_examples=250, deadline=None, derandomize=True)
def test_what_is_refused_without_a_workload_fits_no_workload(
    shape: ModelShape, wanted: Settings, job: Workload, tier: str
) -> None:
    _never_more_than(shape, wanted, job, None if tier == "host" else ROOM)


# Recurrent states, latents, neither; small models of all kinds are drawn above.
@pytest.mark.sample("rows0-Qwen3-Next-80B-A3B", "rows1-DeepSeek-V2-Lite", "rows2-Mixtral-8x7B")
@pytest.mark.parametrize("name", sorted(CONFIGS | LATENT_CONFIGS))
@pytest.mark.parametrize("rows", [(1, 1, 1), (300, 20, 4), (4000, 3000, 60)])
def test_what_is_refused_of_known_models_fits_no_workload(name: str, rows: tuple[int, int, int]) -> None:
    sequences, longest, shortest = rows
    _never_more_than(known_shape(name), Settings(), Workload(sequences, longest, shortest), None)


def _never_more_than(shape: ModelShape, wanted: Settings, job: Workload, device: DeviceBudget | None) -> None:
    """The smallest budget of a workload is not refused, and that of one token is the limit."""
    costs = CostModel(shape, FAST)

    def request(workload: Workload, nbytes: int) -> PlanRequest:
        budget = MemoryBudget(nbytes) if device is None else MemoryBudget(AMPLE, replace(device, nbytes=nbytes))
        return PlanRequest(costs=costs, workload=workload, budget=budget, settings=wanted)

    refuse_too_small(request(job, budget_range(shape, wanted, replace(job, longest=job.least), device)[0]))
    token = Workload(1, 1, 1, 0, 1)
    least = budget_range(shape, wanted, token, device)[0]
    refuse_too_small(request(job, least))
    for refuse in (refuse_too_small, solve):
        with pytest.raises(DoesNotFit, match=f"the smallest that works is .* {-(-least // MIB)}MiB") as refused:
            refuse(request(token, least - 1))
        if refuse is refuse_too_small:
            every = int(re.findall(r" (\d+)MiB", str(refused.value))[-1])
    # What it says of rows of any length is enough for every job within the context.
    within = replace(job, longest=min(job.longest, shape.context))
    assert budget_range(shape, wanted, within, device)[0] <= every * MIB


def test_a_refusal_names_the_budget_of_every_row_where_the_smallest_fits_only_some() -> None:
    job = Workload(200, 4000, 60, 100_000, 20_000)
    shape = plain_model()
    smallest = budget_range(shape, Settings(), job)[0]
    with pytest.raises(DoesNotFit, match=f"--ram {-(-smallest // MIB)}MiB runs all"):
        choose(shape, Settings(), MemoryBudget(GIB // 2), job, FAST)
    with pytest.raises(DoesNotFit) as refused:
        choose(shape, Settings(), MemoryBudget(GIB // 2), replace(job, shortest=4000), FAST)
    assert "every row" not in str(refused.value)
