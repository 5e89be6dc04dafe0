"""When `speculate = "auto"` takes a checkpoint's MTP head (`runtime/jobs/job_plan.py`): where the cost model says that
more tokens of a sequence are free, with the head's bytes and computing counted, and in no lossier format.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.machine.profile import Overheads
from moedge.runtime.engine.lookup import Lookup
from moedge.runtime.engine.predictor import HeadDrafts
from moedge.runtime.jobs import job_plan
from moedge.runtime.jobs.job_plan import plan_job, with_head
from moedge.runtime.jobs.lifecycle import load_model
from moedge.runtime.plan import speculation
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, budget_range, solve
from moedge.runtime.plan.rates import Rates
from moedge.runtime.plan.speculation import head_lack
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import Headers, ModelSource, open_source
from moedge.runtime.text.tokenizer import Tokenizer
from support.speculation import LONGEST, everyone, rows
from support.tiny_mtp import save_mtp

NOTHING = Overheads(1e-12, 1e-12, 1e-12, 1e-15, 1e-12, 1e-15)
# A disk that is slow beside the processor.
BYTES_BIND = Rates(1e5, 1e10, 1e15, NOTHING, {"none": {1: 1e9}, "int8": {1: 1e9}}, measured=True)
SETTINGS = Settings(dtype="fp32", quant="none", kv="fp32", max_sequences=8, tokens_per_pass=64, deterministic=True)
JOB = Workload(8, LONGEST)
MANY = 60
# Bytes beside the least, in which few layers of either are held.
MORE = {"few": 1 << 17, "many": 9 << 18}
# Every layer is dense.
DENSE = {"first_k_dense_replace": 99}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with a head behind few layers, and behind many."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("few", "many")}
    save_mtp("glm4_moe", made["few"], layers=4, **DENSE)
    save_mtp("glm4_moe", made["many"], layers=MANY, **DENSE)
    return made


def best(source: ModelSource, more: int = MORE["many"], rates: Rates = BYTES_BIND, **changed: Any) -> PlanResult:
    settings = replace(SETTINGS, **changed)
    nbytes = budget_range(source.shape, settings, JOB)[0] + more

    def request(model: Headers) -> PlanRequest:
        budget = MemoryBudget(nbytes)
        return PlanRequest(costs=CostModel(model.shape, rates), workload=JOB, budget=budget, settings=settings)

    headers = Headers(source.name, source.shape, source.weights, source.recipe)
    return with_head(solve(request(headers)), request, headers)


@pytest.mark.parametrize(
    ("which", "asked", "taken", "why"),
    [
        ("many", {}, True, "own head for drafts"),
        ("few", {}, False, "the job would take"),
        ("many", {"more": 1 << 30}, False, ""),
        ("many", {"speculate": "off"}, False, ""),
        ("many", {"rates": replace(BYTES_BIND, disk_bytes_s=1e12)}, False, ""),
    ],
    ids=["bytes bind", "few layers", "weights are held", "off", "computing binds"],
)
def test_a_head_is_taken_where_its_tokens_are_free(
    which: str, asked: dict[str, Any], taken: bool, why: str, folders: dict[str, Path]
) -> None:
    with open_source(str(folders[which])) as source:
        found = best(source, **{"more": MORE[which], **asked})
        assert found.request.shape.mtp == taken
        assert len(found.request.shape.layers) == len(source.shape.layers) + taken
    notes = [note for note in found.plan.notes if "own head" in note]
    assert len(notes) == bool(why)
    assert all(why in note for note in notes)
    assert not taken or found.plan.free_tokens[-1] > found.plan.max_sequences


def plan_of(free: tuple[int, ...], **changed: Any) -> Any:
    """What the rule reads of a plan for eight sequences."""
    fields = {"quant": "int4", "dtype": "bf16", "kv": "int8", "compute": "float", "max_sequences": 8, "undrafted": ""}
    return type("Planned", (), fields | {"free_tokens": free} | changed)()


@pytest.mark.parametrize(
    ("free", "longer", "changed", "taken"),
    [
        (16, 1.0, {}, True),
        (16, 1.09, {}, True),
        # However many are free: a head may be useless.
        (40, 1.11, {}, False),
        # One token for each second sequence, half of which come to be accepted, is worth a quarter; half of that goes.
        (12, 1.09, {}, True),
        (9, 1.09, {}, False),
        (9, 1.03, {}, True),
        (8, 1.0, {"free_tokens": (), "undrafted": "passes would take longer"}, False),
        (16, 0.9, {"quant": "nf4"}, False),
        (16, 0.9, {"kv": "int4"}, False),
        (16, 0.9, {"compute": "int8"}, False),
    ],
)
def test_the_rule(free: int, longer: float, changed: dict[str, Any], taken: bool) -> None:
    lack = head_lack(plan_of((free,)), plan_of((free,), **changed), (100.0, 100.0 * longer))
    assert (lack == "") == taken, lack


BUGS: dict[str, tuple[Any, str, Any]] = {
    "what a head takes is not counted": (
        job_plan, "head_lack", lambda without, headed, seconds: head_lack(without, headed, (1.0, 1.0)),
    ),
    "a head is taken whatever it takes": (speculation, "NEARLY", 100.0),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    if "whatever" in bug:
        with pytest.raises(AssertionError):
            test_the_rule(40, 1.11, {}, False)
        return
    with pytest.raises(AssertionError):
        test_a_head_is_taken_where_its_tokens_are_free("few", {}, False, "the job would", folders)


def test_a_checkpoint_without_one_is_planned_without(
    checkpoint: Callable[..., Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Other families, and copies of a checkpoint that leave the head's tensors out, as many do."""
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders["many"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if f"layers.{MANY}." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, copy / "model.safetensors", {"format": "pt"})
    for folder in (copy, checkpoint("llama")):
        with open_source(str(folder)) as source:
            found = best(source, more=MORE["many" if folder == copy else "few"])
            assert found.request.shape == source.shape
            assert found.plan.free_tokens
            assert not any("own head" in note for note in found.plan.notes)


def test_a_job_that_takes_it_has_the_tokens_of_one_without(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the plan to the last token, from one source: what is loaded is what was planned, in a store of its own. The
    head of a random model is never right, so that it ends; sequences then look up their drafts."""
    monkeypatch.setattr("moedge.runtime.engine.predictor._TRIED", 16)
    found: dict[str, tuple[list[list[int]], Any]] = {}
    budgets = Budgets(disk_dir=tmp_path)
    with open_source(str(folders["many"])) as source, Tokenizer.load(source.folder) as tokenizer:
        for speculate in ("off", "auto"):
            planned = best(source, speculate=speculate)
            with closing(load_model(source, tokenizer, (None, planned), budgets).engine) as loaded:
                sequences = rows([])
                for each in sequences:
                    loaded.engine.add(each)
                kinds = {type(each.lookup) for each in everyone(sequences)}
                list(loaded.engine.run())
                found[speculate] = [each.output_ids for each in everyone(sequences)], loaded.engine
                assert kinds == {HeadDrafts if speculate == "auto" else Lookup}
    (plain, without), (ours, engine) = found["off"], found["auto"]
    assert ours == plain
    assert without.predictor is None
    assert engine.predictor.ended
    assert engine.metrics.drafted_tokens > 0


def test_a_saved_plan_keeps_the_choice(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever this machine's own plan would be."""
    import moedge

    budgets = Budgets(ram="4GiB")
    for speculate in ("off", "mtp"):
        report = moedge.plan(str(folders["few"]), ram="4GiB", speculate=speculate)
        assert report.result is not None
        (tmp_path / "plan.json").write_text(json.dumps(report.document))
        with open_source(str(folders["few"])) as source:
            found = plan_job(source, Settings(), budgets, budgets.on_cpu(), JOB, tmp_path / "plan.json")
        assert found.request.shape == report.result.request.shape
        assert found.request.shape.mtp == (speculate == "mtp")
