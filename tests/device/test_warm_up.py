"""Before the first row, every kernel that a job launches was launched once, in each variant
(`runtime/jobs/lifecycle.py`, `quant/kernels/product.py`).
"""

from dataclasses import replace
from itertools import chain, repeat
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.quant.kernels.product import Launch
from moedge.quant.kernels.tuning import TILE_ROWS
from moedge.runtime.jobs.lifecycle import prompt_tokens, rehearse
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.candidate import SAMPLER_NBYTES
from moedge.runtime.plan.placement import Workload

AMPERE = (8, 6)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch, in order."""
    launches: list[Launch] = []
    run = Launch.run

    def count(self: Launch) -> None:
        launches.append(self)
        run(self)

    monkeypatch.setattr(Launch, "run", count)
    return launches


def products(launches: list[Launch]) -> set[tuple[Any, ...]]:
    """What grouped products are compiled for, each variant once."""
    found = [launch for launch in launches if launch.kernel.fn.__name__ == "grouped_product"]
    return {(launch.arguments[-1], launch.arguments[1] is None, launch.warps, launch.stages) for launch in found}


@pytest.mark.parametrize(
    ("family", "quant"), [("mixtral", "none"), pytest.param("gpt_oss", "int8", marks=pytest.mark.slow)]
)
def test_experts_products_are_launched_in_all_tiles_at_load(
    family: str, quant: str, case: Any, fakes: ModuleType, launched: list[Launch]
) -> None:
    tiny = case(family, quant)
    settings = replace(tiny.settings, dtype="bf16", kv="bf16", deterministic=False, attention="torch")
    tiny = replace(tiny, settings=replace(settings, tokens_per_pass=8), lengths=(3, 5), new_tokens=2)
    with fakes.FakeDevice(2, capability=AMPERE) as fake:
        plan = tiny.plan(fake.device)
        assert plan.grouped_products
        loaded = load_engine(tiny.source, plan, None, fake.device)
        at_load = products(launched)
        # 16 rows, 32 and 64; with the activation and without.
        assert {(sizes.rows, sizes.gate is not None) for sizes, *_ in at_load} == {
            (rows, gated) for rows in TILE_ROWS for gated in (True, False)
        }
        launched.clear()
        rehearse(loaded, plan, tiny.job, chain(prompt_tokens([], tiny.source.shape.vocab)))
        assert set() < products(launched) <= at_load
        loaded.close()


def test_the_sampler_of_a_device_has_what_the_plan_sets_aside(case: Any, fakes: ModuleType) -> None:
    """A tile starts as many kernels however large it is."""
    tiny = case("mixtral")
    with fakes.FakeDevice(2) as fake:
        loaded = load_engine(tiny.source, tiny.plan(fake.device), None, fake.device)
        assert loaded.engine.sampler.scratch_nbytes == SAMPLER_NBYTES
        loaded.close()


def test_without_kernels_for_experts_nothing_is_launched(case: Any, fakes: ModuleType, launched: list[Launch]) -> None:
    tiny = case("mixtral")
    with fakes.FakeDevice(2) as fake:
        load_engine(tiny.source, tiny.plan(fake.device), None, fake.device).close()
    assert launched == []


def test_too_little_memory_to_warm_up_in_is_no_error(
    case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_out(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("moedge.runtime.loading.engine_loader.bind_zeros", give_out)
    tiny = case("mixtral")
    with fakes.FakeDevice(2, capability=AMPERE) as fake:
        load_engine(tiny.source, tiny.plan(fake.device), None, fake.device).close()


def test_a_rehearsal_decodes_over_keys_that_are_split(case: Any, fakes: ModuleType, launched: list[Launch]) -> None:
    tiny = case("llama")
    tiny = replace(tiny, settings=replace(tiny.settings, deterministic=False, tokens_per_pass=140))
    # Two runs of the 64 keys that a split has at least.
    job = Workload(2, 150)
    with fakes.FakeDevice(2, capability=AMPERE) as fake:
        plan = replace(tiny, lengths=(140,)).plan(fake.device)
        # The interpreter takes its time.
        plan = replace(plan, stores_by_kernel=False)
        loaded = load_engine(tiny.source, plan, None, fake.device)
        launched.clear()
        rehearse(loaded, plan, job, repeat(7))
        # Only splits are merged.
        assert {"attend_pages", "merge_splits"} <= {each.kernel.fn.__name__ for each in launched}
        assert loaded.engine.metrics.passes == 0
        loaded.close()
