"""`moedge plan`: from headers alone, without torch; its numbers are those of the job that then runs."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedge.offload.machine.hardware import GpuInfo, Hardware
from moedge.offload.machine.profile import Disk, DiskRead, Link, Machine, save_machine
from moedge.plan_report import COLOURS
from moedge.runtime.jobs import job_plan
from moedge.runtime.plan import memory_ledger
from moedge.runtime.plan.plan_file import last_runs
from support.known_shapes import CONFIGS
from support.recorded_machine import RECORDED
from support.row_files import write_rows

CODE = "import sys; from moedge.cli.main import main; main()"
TORCHLESS = "import atexit, os, sys; atexit.register(lambda: 'torch' in sys.modules and os._exit(99));"


@pytest.fixture
def planned(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str], no_curves: None
) -> Callable[..., dict[str, Any]]:
    """`planned(model, *options)` is the document, whatever the exit code."""

    def plan(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        cli("plan", *arguments, "--json")
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


def test_a_plan_loads_no_torch(checkpoint: Callable[[str], Path]) -> None:
    """As a table, with everything that is explained, and as a document."""
    arguments = ["moedge", "plan", str(checkpoint("qwen3_moe")), "--ram", "2GiB", "--quant", "int8", "--explain"]
    code = "import sys; from moedge.cli.main import app; app(standalone_mode=False); sys.argv.append('--json'); app()"
    command = [sys.executable, "-c", f"{TORCHLESS} sys.argv = {arguments!r}; {code}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "tok" in run.stdout


def test_energy_and_its_price_follow_from_the_job_and_its_time(
    checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]]
) -> None:
    given = ("--watts", 200, "--price", "0.30/kWh", "--hosted", "0.10,0.40", "--rows", 3000, "--prompt-tokens", 20)
    found = planned(checkpoint("qwen3_moe"), *given, "--max-tokens", 10)
    schema = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "plan-4.json").read_text())
    jsonschema.validate(found, schema)
    energy, predicted = found["energy"], found["prediction"]
    assert energy["kwh"] == pytest.approx(0.2 * (predicted["loading_s"] + predicted["seconds"]) / 3600)
    assert energy["cost"] == pytest.approx(0.30 * energy["kwh"])
    # 60,000 tokens of prompts and 30,000 generated ones.
    assert energy["hosted"] == pytest.approx(0.06 * 0.10 + 0.03 * 0.40)
    for name in ("kwh", "cost", "hosted"):
        assert energy[f"{name}_per_1000_rows"] == pytest.approx(energy[name] / 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--price", "0.3"), "--price needs --watts"),
        (("--hosted", "1,2"), "--hosted needs --watts"),
        (("--watts", "9", "--price", "cheap"), "--price cheap is no price; wanted 0.30/kWh"),
        (("--watts", "9", "--hosted", "0.1"), "--hosted 0.1 is no price; wanted 0.10,0.40"),
        (("--watts", "9", "--hosted", "-1,2"), "--hosted -1,2 is no price"),
    ],
)
def test_a_price_that_says_nothing_is_refused(
    given: tuple[str, ...], said: str, checkpoint: Callable[[str], Path], cli: Callable[..., int], capsys: Any
) -> None:
    assert cli("plan", checkpoint("qwen3_moe"), *given) == 2
    assert said in capsys.readouterr().err


def test_everything_in_the_document_is_documented(
    checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    page = page.partition("\n## The plan\n")[2].partition("\n## ")[0]
    model = checkpoint("qwen3_moe")
    for found in (planned(model), planned(model, "--ram", "10MiB")):
        for key in found:
            assert f"`{key}`" in page, key
    assert not found["fits"]


def test_what_does_not_fit_exits_with_4_and_the_nearest_that_does_fits(
    checkpoint: Callable[[str], Path], cli: Callable[..., int], planned: Callable[..., dict[str, Any]]
) -> None:
    model = checkpoint("mixtral")
    assert cli("plan", model, "--ram", "10MiB") == 4
    refused = planned(model, "--ram", "10MiB")
    assert "too little" in refused["reason"]
    option, size = refused["nearest"][0].split()
    assert (option, cli("plan", model, option, size)) == ("--ram", 0)


def test_the_rows_of_a_file_are_measured(
    checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, [{"id": str(n), "prompt": "a b " * n, "max_tokens": 5} for n in (1, 9, 4)])
    job = planned(checkpoint("llama"), rows)["job"]
    assert (job["sequences"], job["generated_tokens"]) == (3, 15)
    assert job["longest"] > job["shortest"] > 5
    job = planned(checkpoint("llama"), "--rows", 7, "--prompt-tokens", 11, "--max-tokens", 2)["job"]
    assert (job["sequences"], job["prompt_tokens"], job["generated_tokens"], job["longest"]) == (7, 77, 14, 13)


def test_rows_that_are_left_out_are_counted_with_the_budget_that_takes_them(
    planned: Callable[..., dict[str, Any]], cli: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, rows = files("moedge.demo") / "model", tmp_path / "rows.jsonl"
    prompts = [[300]] * 30 + [[300] * 2000] * 2
    lines = (json.dumps({"id": str(n), "prompt": text, "max_tokens": 5}) for n, text in enumerate(prompts))
    rows.write_text("\n".join(lines))
    refused = planned(model, rows, "--ram", "10MiB")["reason"]
    smallest, every = re.findall(r"--ram (\d+)MiB", refused)
    tight = planned(model, rows, "--ram", f"{smallest}MiB")["left_out"]
    assert tight == {"rows": 2, "takes": f"--ram {every}MiB"}
    assert planned(model, rows, "--ram", f"{every}MiB")["left_out"] is None
    for command in (["plan", model, rows], ["batch", model, rows, "-o", tmp_path / "out.jsonl"]):
        capsys.readouterr()
        cli(*command, "--ram", f"{smallest}MiB")
        told = " ".join("".join(capsys.readouterr()).split())
        assert re.search(rf"2 rows may need more than the \d+ tokens .*--ram {every}MiB", told), told


CHANGES: dict[str, tuple[list[object], Callable[[dict[str, Any]], Any], Any]] = {
    "quant": (["--quant", "nf4"], lambda d: d["plan"]["quant"], "nf4"),
    "kv": (["--kv", "int8"], lambda d: d["plan"]["kv"], "int8"),
    "dtype": (["--dtype", "bf16"], lambda d: d["plan"]["dtype"], "bf16"),
    "compute": (["MOEDGE_COMPUTE=int8"], lambda d: (d["plan"]["quant"], d["plan"]["compute"]), ("int8", "int8")),
    "deterministic": (["--deterministic"], lambda d: d["plan"]["deterministic"], True),
    "tokens-per-pass": (["--tokens-per-pass", 96], lambda d: d["plan"]["tokens_per_pass"], 96),
    "max-sequences": (["--max-sequences", 3], lambda d: d["plan"]["max_sequences"], 3),
    "ram": (["--ram", "1500MiB"], lambda d: d["tiers"][0]["budget"], 1500 << 20),
    "disk": (["--disk", "1GiB"], lambda d: d["tiers"][-1]["budget"], 1 << 30),
    "gpu-mem": (["--gpu-mem", "0"], lambda d: [tier["tier"] for tier in d["tiers"]], ["host", "disk"]),
}


def test_every_option_changes_what_it_should(
    checkpoint: Callable[[str], Path],
    planned: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Prepared weights of other models would count against --disk.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = checkpoint("qwen3_moe")
    by_default = planned(model)
    for option, (arguments, found, wanted) in CHANGES.items():
        assert found(planned(model, *arguments)) == wanted, option
        assert option == "gpu-mem" or found(by_default) != wanted, option


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_rows(path, [{"id": str(n), "prompt": "a b " * n, "max_tokens": 6} for n in (1, 5, 9)])
    return path


def batch(cli: Callable[..., int], model: Path, rows: Path, plan: Path, *options: object) -> tuple[int, dict[str, Any]]:
    summary = rows.parent / "summary.json"
    summary.unlink(missing_ok=True)
    out = rows.parent / f"out-{len(list(rows.parent.iterdir()))}.jsonl"
    code = cli("batch", model, rows, "-o", out, "--plan", plan, "--summary", summary, "-q", *options)
    return code, json.loads(summary.read_text()) if summary.exists() else {}


def test_a_saved_plan_is_what_runs(
    checkpoint: Callable[[str], Path], cli: Callable[..., int], rows: Path, tmp_path: Path, no_curves: None
) -> None:
    model, saved = checkpoint("qwen3_moe"), tmp_path / "plan.json"
    assert cli("plan", model, rows, "--ram", "3GiB", "--quant", "nf4", "--max-sequences", 2, "--save", saved) == 0
    code, summary = batch(cli, model, rows, saved)
    planned = json.loads(saved.read_text())
    assert code == 0
    assert summary["plan"] | planned["plan"] == summary["plan"]
    assert summary["predicted"]["generated_tok_s"] == pytest.approx(planned["prediction"]["generated_tok_s"])


@pytest.mark.parametrize("changed", ["model", "machine", "setting", "budget", "nothing that is a plan"])
def test_a_plan_for_something_else_is_refused(
    changed: str,
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_curves: None,
) -> None:
    model, saved = checkpoint("qwen3_moe"), tmp_path / "plan.json"
    assert cli("plan", model, rows, "--ram", "3GiB", "--quant", "nf4", "--save", saved) == 0
    options: list[object] = []
    wanted = f"another {changed}"
    if changed == "model":
        model = checkpoint("mixtral")
    elif changed == "machine":
        content = json.loads(saved.read_text())
        content["machine"]["key"] = "0" * 16
        saved.write_text(json.dumps(content))
    elif changed == "setting":
        options, wanted = ["--quant", "int8"], "quant nf4, and int8 was asked for"
    elif changed == "budget":
        options, wanted = ["--ram", "300MiB"], "are granted now"
    else:
        saved.write_text("{}")
        wanted = "holds no plan"
    capsys.readouterr()
    assert batch(cli, model, rows, saved, *options)[0] == 4
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_another_machine_is_planned_for_from_its_profile(
    checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    gpu = Hardware("another", 8, 32 << 30, (GpuInfo("a GPU", 8 << 30),), "nvme ext4")
    disk = Disk(True, 1 << 30, (DiskRead(1 << 22, 4, 3e9),))
    save_machine(Machine(gpu, 4e10, disk, Link(1e10, 2e10)), tmp_path / "box.json")
    found = planned(checkpoint("mixtral"), "--machine", tmp_path / "box.json")
    assert found["machine"]["hardware"]["cpu"] == "another"
    assert found["machine"]["measured"]
    assert [tier["tier"] for tier in found["tiers"]] == ["device", "host", "disk"]
    assert found["tiers"][0]["budget"] == (8 << 30) - (1 << 29)


@pytest.mark.parametrize("tried", [None, {"attention": "does not compile", "cache": "", "experts": "needs 8.0"}])
def test_a_plan_says_what_the_gpu_s_kernels_lack_as_far_as_doctor_tried_them(
    tried: dict[str, str] | None,
    cli: Callable[..., int],
    planned: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    turing = Hardware("another", 8, 32 << 30, (GpuInfo("a GPU", 8 << 30, "7.5", 40),), "nvme ext4")
    save_machine(Machine(turing, 4e10, link=Link(1e10, 2e10), kernel_lacks=tried), tmp_path / "box.json")
    model = files("moedge.demo") / "model"
    plan = planned(model, "--machine", tmp_path / "box.json")["plan"]
    assert plan["dtype"] == "fp16", "of a bfloat16 checkpoint"
    if tried is None:
        assert set(plan["lacks"]) == {"attention", "cache", "experts", "sampling"}
        assert all("run `moedge doctor`" in reason for reason in plan["lacks"].values())
    else:
        assert plan["lacks"] == {"attention": "does not compile", "experts": "needs 8.0"}
    assert (plan["attention"], plan["stores_by_kernel"]) == ("torch", tried is not None)
    assert cli("plan", model, "--machine", tmp_path / "box.json") == 0
    told = capsys.readouterr().out
    assert "dtype is fp16: compute capability 7.5 has no tensor cores for bfloat16" in told
    assert f"torch computes instead of the GPU kernels for attention. {plan['lacks']['attention']}" in told


def test_a_run_is_remembered_beside_what_was_predicted(
    cli: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run is predicted from the first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(job_plan, "LEAST_SECONDS", 0.0)
    path = tmp_path / "in.jsonl"
    write_rows(path, [{"prompt": f"{n} a", "max_tokens": 8, "ignore_eos": True} for n in range(4)])
    model, predicted = files("moedge.demo") / "model", []
    for index in range(2):
        summary = tmp_path / f"{index}.json"
        assert (
            cli("batch", model, path, "-o", tmp_path / f"out{index}", "--summary", summary, "-q", "--quant", "none")
            == 0
        )
        predicted.append(json.loads(summary.read_text())["predicted"]["generate_s"])
    newest, first = last_runs(9)
    assert first.predicted_tok_s == pytest.approx(32 / predicted[0])
    assert predicted[1] == pytest.approx(predicted[0] * first.ratio, rel=0.05)
    assert newest.measured_peak_nbytes > 0


def test_memory_that_changes_nothing_is_told_in_one_line(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str], checkpoint: Callable[[str], Path]
) -> None:
    """Of a curve that ends flat the first of the equal points stands for the rest; one that rises keeps them all."""
    assert cli("plan", checkpoint("qwen3_moe"), "--ram", "8GiB", "--rows", "64") == 0
    sequences, memory = capsys.readouterr().out.split("tok/s by ")[1:]
    assert memory.count("no gain from more") == 1
    assert len([line for line in memory.splitlines() if "█" in line]) == 1
    assert len([line for line in sequences.splitlines() if "█" in line]) > 2


def test_rows_longer_than_the_context_are_said_before_anything_else(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str], no_curves: None
) -> None:
    model = files("moedge.demo") / "model"
    for prompt_tokens, said in ((1700, False), (1900, True)):
        assert cli("plan", model, "--prompt-tokens", prompt_tokens, "--ram", "3GiB") == 0
        first = "rows of 2,156 tokens, prompt and answer, are longer than the model's context of 2,048"
        captured = capsys.readouterr()
        assert (first in captured.out + captured.err) is said


@pytest.mark.sample("Qwen3-30B-A3B-GPU", "gpt-oss-20b-6 GiB")
@pytest.mark.parametrize(
    "options",
    [["--gpu-mem", "0"], ["--gpu-mem", "0", "--ram", "6GiB"], []],
    ids=["processor", "6 GiB", "GPU"],
)
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "gpt-oss-20b"])
def test_every_arena_of_a_plan_is_named(
    name: str,
    options: list[str],
    tmp_path: Path,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    no_curves: None,
) -> None:
    """With recurrent states, buffers of fused layers, rings, weights that are staged for a GPU."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_machine(RECORDED, machine := tmp_path / "machine.json")
    assert cli("plan", tmp_path, "--machine", machine, "--quant", "nf4", *options, "--explain") == 0
    assert "estimate" in capsys.readouterr().out


def test_colours_are_of_arenas_that_there_are() -> None:
    """A renamed arena would lose its colour, and nobody would see why."""
    sources = "".join(path.read_text() for path in Path(memory_ledger.__file__).parent.glob("*.py"))
    assert [name for name in COLOURS if f'"{name}"' not in sources] == []
