"""Every family of kernels that does not compile or computes wrong numbers (`runtime/loading/selftest.py`) falls back to
torch, alone and with its reason; the job ends with the tokens that it would have had.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.apps.doctor.kernels import check_kernels
from moedge.offload.machine.hardware import Hardware
from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.quant.kernels.product import Launch
from moedge.quant.matmul import grouped_selftest as products
from moedge.runtime.jobs import lifecycle
from moedge.runtime.loading import engine_loader as load
from moedge.runtime.loading import machine_memory as tiers
from moedge.runtime.loading import selftest
from moedge.runtime.loading.selftest import KernelNeeds
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.plan_file import load_plan
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from moedge.what_if import document
from support.row_files import read_rows, write_rows

AMPERE, TURING = (8, 6), (7, 5)
KERNELS = {
    "attention": {"attend_pages", "merge_splits"},
    "cache": {"store_tokens"},
    "experts": {"grouped_product"},
    "sampling": {"draw_rows"},
}
SMALL = {"num_hidden_layers": 1, "num_local_experts": 4}
EXACT = ("--dtype", "fp32", "--quant", "none", "--kv", "fp32", "--tokens-per-pass", "16", "--max-sequences", "2")


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, and nothing launched at load: the interpreter takes its time."""
    monkeypatch.setattr(selftest, "_QUANTIZED", ())
    monkeypatch.setattr(load, "warm_up_products", lambda *_: None)
    needs = KernelNeeds("fp32", ((2, 2, 16, None),), ((64, 32),))
    monkeypatch.setattr(selftest, "usual_needs", lambda device: needs)
    monkeypatch.setattr(products, "FORMATS", ("none",))
    monkeypatch.setattr("moedge.runtime.sampling.kernel.VOCAB", 97)


Batch = Callable[..., tuple[int, list[Any], dict[str, Any]]]


def run_job(model: Path, folder: Path, fake: Any, *options: str) -> tuple[int, list[Any], dict[str, Any]]:
    """The exit code, the answers and the summary of one job, which is not rehearsed."""
    from moedge.cli.main import main

    rows, out, numbers = (folder / f"{len(list(folder.iterdir()))}{name}" for name in (".jsonl", ".out.jsonl", ".json"))
    # So hot and so narrow that the token is the first one.
    write_rows(rows, [{"prompt": "a b c", "max_tokens": 2, "temperature": 0.7, "top_k": 1}])
    arguments = ["batch", str(model), str(rows), "-o", str(out), *EXACT, *options]

    def rehearse(*_: Any) -> None:
        """In its place, so that the launches which are counted are those of passes."""
        if fake:
            fake.launched.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(tiers, "find_device", lambda: fake and fake.device)
        patch.setattr(lifecycle, "rehearse", rehearse)
        patch.setattr(sys, "argv", ["moedge", *arguments, "--summary", str(numbers)])
        with pytest.raises(SystemExit) as ended:
            main()
    answers = [row["text"] for row in read_rows(out)] if out.exists() else []
    return int(ended.value.code or 0), answers, json.loads(numbers.read_text()) if numbers.exists() else {}


@pytest.fixture
def batch(checkpoint: Callable[..., Path], tmp_path: Path, few_cases: None) -> Batch:
    """`batch(fake, *options)` runs one job on a fake device."""
    return partial(run_job, checkpoint("mixtral", **SMALL), tmp_path)


@pytest.fixture(scope="module")
def wanted(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The processor's answers."""
    code, answers, _ = run_job(checkpoint("mixtral", **SMALL), tmp_path_factory.mktemp("wanted"), None)
    assert code == 0
    return answers


@contextmanager
def broken(names: set[str], way: str) -> Iterator[None]:
    """Kernels that raise, as one that does not compile, or that compute other numbers than they should."""
    run = Launch.run

    def run_broken(self: Launch) -> None:
        if self.kernel.fn.__name__ not in names:
            run(self)
        elif way == "raises":
            raise AttributeError("'int' object has no attribute '_flatten_ir'")
        else:
            run(self)
            spoil(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", run_broken)
        yield


def spoil(launch: Launch) -> None:
    """Half as much again of what a kernel has written."""
    name, arguments = launch.kernel.fn.__name__, launch.arguments
    if name == "grouped_product":
        arguments[2].mul_(1.5)
    elif name == "store_tokens":
        arguments[2].codes.mul_(1.5)
    elif name == "draw_rows":
        arguments[6].add_(1)
    else:
        arguments[0 if name == "merge_splits" else 1][0].mul_(1.5)


def test_kernels_that_are_right_are_used_and_nothing_is_said(
    batch: Batch, wanted: list[Any], fakes: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control of the tests below: with the same cases nothing falls back."""
    with fakes.FakeDevice(capability=AMPERE) as fake:
        tried = check_kernels(fake.device)
        assert [finding.verdict for finding in tried] == ["ok"]
        capsys.readouterr()
        code, answers, summary = batch(fake)
    assert (code, answers) == (0, wanted)
    plan = summary["plan"]
    assert (plan["lacks"], plan["notes"]) == ({}, [])
    assert (plan["attention"], plan["grouped_products"]) == ("triton", True)
    assert (plan["stores_by_kernel"], plan["draws_by_kernel"]) == (True, True)
    assert min(fake.launched[name] for name in ("attend_pages", "grouped_product", "store_tokens", "draw_rows")) > 0
    assert "torch computes" not in capsys.readouterr().err


@pytest.mark.sample("cache-raises")
@pytest.mark.parametrize("way", ["raises", "is wrong"])
@pytest.mark.parametrize("family", KERNELS)
def test_a_broken_family_falls_back_alone_and_the_job_ends(
    family: str,
    way: str,
    batch: Batch,
    wanted: list[Any],
    fakes: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    with fakes.FakeDevice(capability=AMPERE) as fake, broken(KERNELS[family], way):
        findings = check_kernels(fake.device)
        code, answers, summary = batch(fake)
    assert (code, answers) == (0, wanted)
    plan = summary["plan"]
    reason = {"raises": "'int' object has no attribute '_flatten_ir'", "is wrong": "wrong numbers"}[way]
    assert set(plan["lacks"]) == {family}
    assert reason in plan["lacks"][family]
    told = " ".join(capsys.readouterr().err.split())
    assert f"torch computes instead of the GPU kernels for {family}. {plan['lacks'][family]}" in told
    assert [finding.verdict for finding in findings] == ["warn", "ok"]
    assert reason in findings[0].found
    used = {"attention": plan["attention"] == "triton", "cache": plan["stores_by_kernel"]}
    used |= {"experts": plan["grouped_products"], "sampling": plan["draws_by_kernel"]}
    assert used == {name: name != family for name in KERNELS}
    passes = {name: sum(fake.launched[kernel] for kernel in KERNELS[name]) > 0 for name in KERNELS}
    assert passes == used


def test_kernels_that_are_asked_for_and_broken_are_refused_with_the_reason(
    batch: Batch, fakes: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fakes.FakeDevice(capability=AMPERE) as fake, broken({"attend_pages"}, "is wrong"):
        monkeypatch.setenv("MOEDGE_ATTENTION", "triton")
        assert batch(fake)[0] == 4
        told = " ".join(capsys.readouterr().err.split())
        assert "wrong numbers here: attention (decode) of" in told
        monkeypatch.setenv("MOEDGE_ATTENTION", "torch")
        code, _, summary = batch(fake)
    assert (code, summary["plan"]["lacks"], summary["plan"]["stores_by_kernel"]) == (0, {}, False)


JOB = Workload(3, 46, 8, 60, 18)


def question(shape: Any, settings: Settings, job: Any, gpu: Gpu) -> PlanRequest:
    budget = MemoryBudget(1 << 36, DeviceBudget(1 << 33, 600 << 20, 1 << 30, gpu))
    return PlanRequest(
        costs=CostModel(shape),
        workload=job,
        budget=budget,
        settings=settings,
        hardware=Hardware("a CPU", 2, 1 << 36, (), "a disk"),
    )


def test_reasons_are_in_the_document_of_a_plan_and_a_saved_plan_wants_its_kernels(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from moedge.plan_report import PlanReport

    tiny = case("qwen3_moe")
    whole = question(tiny.source.shape, tiny.settings, JOB, Gpu(AMPERE, 28))
    part = question(tiny.source.shape, tiny.settings, JOB, Gpu(AMPERE, 28, Lacks(attention="it does not compile")))
    documents = [json.loads(json.dumps(document("a model", solve(each), [], [], 0))) for each in (whole, part)]
    assert [found["plan"]["lacks"] for found in documents] == [{}, {"attention": "it does not compile"}]
    PlanReport(documents[1]).print()
    assert "torch computes instead of the GPU kernels for attention. it does not compile" in capsys.readouterr().out
    plan = Plan.from_json(documents[0]["plan"])
    assert plan == solve(whole).plan
    files = [tmp_path / "whole.json", tmp_path / "part.json"]
    for file, content in zip(files, documents, strict=True):
        file.write_text(json.dumps(content))
    assert load_plan(files[0], whole) == plan
    assert load_plan(files[1], part) == solve(part).plan
    with pytest.raises(SettingError, match=r"kernels for attention\. it does not compile"):
        load_plan(files[0], part)


@pytest.mark.parametrize(
    ("capability", "wanted", "dtype", "note"),
    [
        (TURING, "auto", "fp16", "dtype is fp16: compute capability 7.5 has no tensor cores for bfloat16"),
        (TURING, "bf16", "bf16", "bf16 is several times slower than fp16 on it"),
        (TURING, "fp32", "fp32", ""),
        (TURING, "fp16", "fp16", ""),
        ((8, 0), "auto", "bf16", ""),
        ((0, 0), "auto", "bf16", ""),
    ],
)
def test_bfloat16_is_left_where_it_is_slow_unless_it_is_asked_for(
    capability: tuple[int, int], wanted: str, dtype: str, note: str, case: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from moedge.plan_report import PlanReport

    tiny = case("qwen3_moe")
    shape = replace(tiny.source.shape, dtype="bf16")
    asked = question(shape, Settings(dtype=wanted, quant="none"), JOB, Gpu(capability, 14))
    result = solve(asked)
    plan = result.plan
    assert plan.dtype == dtype
    assert plan.kv == dtype, "where all have room keys and values are native"
    assert len(plan.notes) == bool(note)
    assert note in "".join(plan.notes)
    PlanReport(document("a model", result, [], [], 0)).print()
    assert note in capsys.readouterr().out
    without_gpu = replace(asked, budget=MemoryBudget(1 << 36))
    assert solve(without_gpu).plan.dtype == ("bf16" if wanted == "auto" else wanted)
