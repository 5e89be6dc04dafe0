"""Real outputs of commands against the schemas of docs/schemas, and the versions that its page names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedge.cli.views import progress
from moedge.offload.machine import profile
from moedge.runtime.evaluation import check, speed
from moedge.runtime.jobs import status, summary
from moedge.runtime.plan import plan_file

DOCS = Path(__file__).parents[2] / "docs"
LAYOUTS = (
    plan_file.SCHEMA,
    profile.SCHEMA,
    summary.SCHEMA,
    progress.SCHEMA,
    status.SCHEMA,
    speed.SCHEMA,
    check.SCHEMA,
)
Cli = Callable[..., int]


def schema_of(layout: str) -> dict[str, Any]:
    name, number = layout.removeprefix("moedge.").split("/")
    found: dict[str, Any] = json.loads((DOCS / "schemas" / f"{name}-{number}.json").read_text())
    assert found["$id"] == f"urn:{layout}"
    return found


def validate(found: Any, layout: str) -> None:
    schema = schema_of(layout)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_page_names_the_layouts_of_the_code() -> None:
    page = (DOCS / "schemas.md").read_text()
    for layout in LAYOUTS:
        assert f"`{layout}`" in page
    for path in (DOCS / "schemas").glob("*.json"):
        assert f"schemas/{path.name}" in page
        assert path.stem.replace("-", "/") in {layout.removeprefix("moedge.") for layout in LAYOUTS}


@pytest.mark.parametrize(("options", "code"), [(("--ram", "3GiB"), 0), (("--ram", "300MiB"), 4)])
def test_a_plan(
    options: tuple[str, ...], code: int, checkpoint: Callable[[str], Path], cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("plan", checkpoint("qwen3_moe"), "--json", "--gpu-mem", "0", *options) == code
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] == (code == 0)
    validate(found, plan_file.SCHEMA)


def test_the_findings_of_doctor(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("doctor", "--quick", "--json") in (0, 3)
    validate(json.loads(capsys.readouterr().out), profile.SCHEMA)


def test_a_measured_machine() -> None:
    from support.recorded_machine import RECORDED

    found = {"schema": profile.SCHEMA, "machines": [RECORDED.to_json()]}
    validate(json.loads(json.dumps(found)), profile.SCHEMA)


def test_jobs(
    checkpoint: Callable[[str], Path],
    cli: Cli,
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_file(Path("in.jsonl"), [{"id": "a", "prompt": "Hello", "max_tokens": 2}, {"id": "b", "prompt": 3}])
    assert (
        cli("batch", checkpoint("llama"), rows, "-o", "out.jsonl", "--ram", "3GiB", "--gpu-mem", "0", "--lenient") == 3
    )
    capsys.readouterr()
    assert cli("jobs", "ls", "--json") == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert cli("jobs", "show", "out.jsonl", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # Jobs that ran in this process before are listed, too.
    assert found in listed
    assert found["usage"]["output_tokens"] == 2
    validate(found, status.SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        validate({**found, "status": "unheard of"}, status.SCHEMA)


@pytest.mark.slow
def test_what_bench_and_check_write(checkpoint: Callable[[str], Path], cli: Cli) -> None:
    model = checkpoint("qwen3_moe")
    load = ("--sequences", "1,2", "--prompt-tokens", "20", "--max-tokens", "3")
    files = ("--json", "bench.json", "--page", "bench.html")
    assert cli("bench", model, *load, "--ram", "3GiB", "--gpu-mem", "0", *files) == 0
    validate(json.loads(Path("bench.json").read_text()), speed.SCHEMA)
    page = Path("bench.html").read_text()
    assert "Time to the first token" in page
    assert "http" not in page.replace("http-equiv", "")
    assert cli("check", model, "--ram", "3GiB", "--json", "check.json") == 0
    validate(json.loads(Path("check.json").read_text()), check.SCHEMA)
