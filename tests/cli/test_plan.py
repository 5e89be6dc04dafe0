"""`moedge plan`: from headers alone, without torch; its numbers are those of the job that then runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CODE = "import sys; from moedge.cli.main import main; main()"
TORCHLESS = "import atexit, os, sys; atexit.register(lambda: 'torch' in sys.modules and os._exit(99));"


@pytest.fixture
def planned(cli: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`planned(model, *options)` is the document, whatever the exit code."""

    def plan(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        cli("plan", *arguments, "--json")
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


@pytest.mark.parametrize("output", [[], ["--json"], ["--explain"]], ids=["table", "json", "explain"])
def test_a_plan_loads_no_torch(checkpoint: Callable[[str], Path], output: list[str]) -> None:
    arguments = ["moedge", "plan", str(checkpoint("qwen3_moe")), "--ram", "2GiB", *output]
    command = [sys.executable, "-c", f"{TORCHLESS} sys.argv = {arguments!r}; {CODE}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "tok" in run.stdout


def test_everything_in_the_document_is_documented(
    checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
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
    rows.write_text(
        "".join(json.dumps({"id": str(n), "prompt": "a b " * n, "max_tokens": 5}) + "\n" for n in (1, 9, 4))
    )
    job = planned(checkpoint("llama"), rows)["job"]
    assert (job["sequences"], job["generated_tokens"]) == (3, 15)
    assert job["longest"] > job["shortest"] > 5
    job = planned(checkpoint("llama"), "--rows", 7, "--prompt-tokens", 11, "--output-tokens", 2)["job"]
    assert (job["sequences"], job["prompt_tokens"], job["generated_tokens"], job["longest"]) == (7, 77, 14, 13)


CHANGES: dict[str, tuple[list[object], Callable[[dict[str, Any]], Any], Any]] = {
    "quant": (["--quant", "nf4"], lambda d: d["plan"]["quant"], "nf4"),
    "kv": (["--kv", "int8"], lambda d: d["plan"]["kv"], "int8"),
    "dtype": (["--dtype", "bf16"], lambda d: d["plan"]["dtype"], "bf16"),
    "compute": (["--compute", "int8"], lambda d: (d["plan"]["quant"], d["plan"]["compute"]), ("int8", "int8")),
    "deterministic": (["--deterministic"], lambda d: d["plan"]["deterministic"], True),
    "tokens-per-pass": (["--tokens-per-pass", 96], lambda d: d["plan"]["tokens_per_pass"], 96),
    "max-sequences": (["--max-sequences", 3], lambda d: d["plan"]["max_sequences"], 3),
    "ram": (["--ram", "1500MiB"], lambda d: d["tiers"][0]["budget"], 1500 << 20),
    "disk": (["--disk", "1GiB"], lambda d: d["tiers"][-1]["budget"], 1 << 30),
    "gpu-mem": (["--gpu-mem", "0"], lambda d: [tier["tier"] for tier in d["tiers"]], ["host", "disk"]),
}


@pytest.mark.parametrize("option", CHANGES)
def test_every_option_changes_what_it_should(
    option: str, checkpoint: Callable[[str], Path], planned: Callable[..., dict[str, Any]]
) -> None:
    arguments, found, wanted = CHANGES[option]
    assert found(planned(checkpoint("qwen3_moe"), *arguments)) == wanted
    assert option == "gpu-mem" or found(planned(checkpoint("qwen3_moe"))) != wanted
