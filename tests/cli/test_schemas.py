"""Real outputs of commands against the schemas of `docs/schemas/`, and the versions that its page names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedge.apps.documents import run as documents
from moedge.apps.evaluation import command as evaluate
from moedge.cli.views import progress
from moedge.offload.machine import profile
from moedge.offload.store import manifest
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
    documents.SCHEMA,
    evaluate.SCHEMA,
    plan_file.RUNS_SCHEMA,
    manifest.FORMAT,
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
    page = (DOCS / "reference.md").read_text()
    for layout in LAYOUTS:
        assert f"`{layout}`" in page
    for path in (DOCS / "schemas").glob("*.json"):
        assert f"schemas/{path.name}" in page
        assert path.stem in {layout.removeprefix("moedge.").replace("/", "-") for layout in LAYOUTS}


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


def test_a_job_over_documents_and_its_runs(checkpoint: Callable[[str], Path], cli: Cli) -> None:
    Path("letters").mkdir()
    Path("letters/a.txt").write_text("Dear sirs, the river rises.")
    asked = ("--prompt", "What rises?", "--max-tokens", "3", "--ram", "3GiB", "--gpu-mem", "0")
    assert cli("docs", checkpoint("llama"), "letters", "-o", "out.jsonl", *asked, "--summary", "sum.json") == 0
    found = json.loads(Path("sum.json").read_text())
    validate(found, documents.SCHEMA)
    assert [each["rows"]["ok"] for each in found["rounds"]] == [1]
    validate(found["rounds"][0], summary.SCHEMA)


def test_the_schema_of_a_run_is_that_of_its_types() -> None:
    def bare(schema: Any) -> Any:
        """Without words, which differ between releases of pydantic."""
        if isinstance(schema, list):
            return [bare(each) for each in schema]
        words = ("title", "description") if isinstance(schema, dict) and not {"p50", "rows"} & schema.keys() else ()
        return {name: bare(each) for name, each in schema.items() if name not in words} if words else schema

    assert bare(schema_of(summary.SCHEMA)) == bare(summary.json_schema())


def test_prepared_weights_and_the_history_of_runs(
    checkpoint: Callable[[str], Path], cli: Cli, rows_file: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    assert cli("prepare", checkpoint("qwen3_moe"), "-o", "store", "--quant", "int8") == 0
    validate(json.loads(Path("store/manifest.json").read_text()), manifest.FORMAT)
    record = plan_file.PastRun("2026-11-22T10:00:00+00:00", "m", "model", "s", "f", "disk", 1.5, 2.0, 3.0, 4, 5)
    plan_file.keep(record, Path("runs.json"))
    validate(json.loads(Path("runs.json").read_text()), plan_file.RUNS_SCHEMA)


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
