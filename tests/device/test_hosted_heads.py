"""An MTP head over sequences whose keys and values lie in host memory (`runtime/attention/cohorts.py`): it drafts what
its definition gives, and its layer crosses the link when it is called, never with the pass.
"""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.runtime.attention.cohorts import CohortAttention
from moedge.runtime.engine.predictor import MOST_PREDICTED, HeadDrafts
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.settings import Budgets, Settings
from moedge.runtime.source.model_source import open_source
from support.tiny_mtp import Reference, save_mtp

# Blocks for so many sequences on the device, and cohorts with room for so many each.
WHERE = {"none": (6, 0, 0), "half": (3, 2, 2), "all but one": (1, 3, 2)}


def drafted(tiny: Any, plan: Any, device: Any, folder: Path) -> tuple[list[list[int]], Any, Counter[int]]:
    """Tokens, the host's cohorts, and how many drafts of each length were compared with the definition's."""
    reference, compared = Reference.read(folder), Counter[int]()
    with closing(load_engine(tiny.source, plan, tiny.store if plan.streams else None, device)) as loaded:
        engine = loaded.engine
        engine.predictor.depth = MOST_PREDICTED
        engine.predictor.judge = lambda drafted, accepted: None
        sequences = [Sequence(ids, tiny.params(index, 0.0)) for index, ids in enumerate(tiny.prompts)]
        for sequence in sequences:
            engine.add(sequence)
        while engine.busy:
            engine.step()
            for each in engine.scheduler.running:
                assert isinstance(each.lookup, HeadDrafts)
                if found := each.lookup.ids:
                    wanted = reference.drafts(each.tokens(0, each.num_tokens), len(found))
                    assert wanted.argmax(-1).tolist() == found
                    compared[each.table.cohort] += 1
        return [each.output_ids for each in sequences], loaded.host_kv, compared


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory, tiny_engine: ModuleType, host_kv: ModuleType) -> Any:
    """`headed(family)` is a tiny model with a head, in a store, and its folder."""
    made: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in made:
            folder, store = save_mtp(family, tmp_path_factory.mktemp("headed")), tmp_path_factory.mktemp("store") / "s"
            with open_source(str(folder)) as source:
                found = source.speculating(Settings(speculate="mtp"))
                prepare(found, store, "none", "fp32", Budgets().on_cpu())
            made[family] = host_kv.many(tiny_engine.Case(found, store, tiny_engine.exact("none"))), folder
        return made[family]

    return make


@pytest.mark.sample("half-glm4_moe-by the device", "all but one-glm4_moe-by the CPU")
@pytest.mark.parametrize("attends", ["by the device", "by the CPU"])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("where", list(WHERE))
def test_it_drafts_what_its_definition_gives(
    where: str, family: str, attends: str, headed: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    tiny, folder = headed(family)
    here = attends == "by the CPU"
    if here and family == "deepseek_v3":
        pytest.skip("the CPU does not attend to latents")
    whole = replace(host_kv.hosted(tiny, tiny.plan(None), 6), free_tokens=(256,) * 4)
    wanted, _, _ = drafted(tiny, whole, None, folder)
    fake = fakes.FakeDevice(seed=len(family))
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), *WHERE[where], here=here)
    with fake:
        tokens, cohorts, compared = drafted(tiny, replace(plan, free_tokens=(256,) * 4), fake.device, folder)
    assert tokens == wanted
    assert (sum(compared[cohort] for cohort in compared if cohort) > 10) == (where != "none")
    assert (cohorts is None) == (where == "none")


@pytest.mark.parametrize("bug", ["the head's layer is asked for with the pass", "the head reads another layer"])
def test_a_planted_bug_is_found(
    bug: str, headed: Any, fakes: ModuleType, host_kv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CohortAttention._begin

    def asked(self: Any, batch: Any, device: Any, layers: list[int]) -> None:
        begin(self, batch, device, self._layers + self._head if "pass" in bug else self._layers[: len(layers)])

    monkeypatch.setattr(CohortAttention, "_begin", asked)
    with pytest.raises((AssertionError, RuntimeError)):
        test_it_drafts_what_its_definition_gives("half", "glm4_moe", "by the device", headed, fakes, host_kv)
