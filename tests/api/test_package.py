"""The package moedge (`api/__init__.py`): what importing it loads, what a checker and a wheel see, budgets of a
process, and the guide (`docs/python.md`).
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import moedge

ROOT = Path(__file__).parents[2]


def python(code: str, folder: Path = ROOT, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_importing_moedge_and_planning_load_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
import moedge
assert set(moedge.__all__) <= set(dir(moedge))
assert not any(name.startswith(("moedge.", "rich", "torch")) for name in sys.modules), "nothing is loaded in advance"
from moedge import MoedgeError, RequestOutput, SamplingParams, plan
report = plan({str(ROOT / "examples/tiny_moe/model")!r}, ram="2GiB")
assert report.fits
assert "torch" not in sys.modules
print(moedge.__version__, report)
"""
    shown = python(code, tmp_path)
    assert "tok/s by RAM budget" in shown


def test_every_name_is_there_and_no_other() -> None:
    assert {name: getattr(moedge, name).__name__ for name in moedge.__all__ if name != "__version__"} == {
        name: name for name in moedge.__all__ if name != "__version__"
    }
    with pytest.raises(
        AttributeError, match="module 'moedge' has no attribute 'LMM'; it has AsyncLLM, CheckReport, ChoiceScores"
    ):
        _ = moedge.LMM  # type: ignore[attr-defined]


def test_python_m_moedge_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "moedge", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"moedge {moedge.__version__}\n"


def test_a_report_is_the_text_of_the_command_and_html() -> None:
    report = moedge.plan(ROOT / "examples/tiny_moe/model", ram=2 << 30, rows=10)
    command = [sys.executable, "-m", "moedge", "plan", str(ROOT / "examples/tiny_moe/model"), "--rows", "10"]
    said = subprocess.run([*command, "--ram", "2GiB"], capture_output=True, text=True, check=True).stdout
    # The processes differ in size, and so does what is free for the rest; the layout does not.
    assert re.sub(r"[\d.,]+", "0", repr(report)).split() == re.sub(r"[\d.,]+", "0", said).split()
    html = report._repr_html_()
    assert html.startswith("<pre>")
    assert "tok/s by RAM budget" in html
    refused = moedge.plan(ROOT / "examples/tiny_moe/model", ram="20MiB")
    assert not refused.fits
    assert repr(refused).startswith("does not fit: 20 MiB of host memory is too little")
    with pytest.raises(moedge.MoedgeError, match="too little"):
        refused.save(ROOT / "never.plan")


BUDGET = """
import sys
from moedge import LLM, MoedgeError, SamplingParams
model = sys.argv[1]
params = SamplingParams(max_tokens=4)
with LLM(model, ram="1300MiB", max_model_len=256, rows=2000, prompt_tokens=20, output_tokens=8) as llm:
    outputs = llm.generate([f"{index} and the" for index in range(2000)], params, progress=False)
    assert [output.prompt for output in outputs] == [f"{index} and the" for index in range(2000)]
    host = llm.memory.tiers["host"]
    assert host.planned <= host.budget == 1300 << 20
    print(host.peak, {name: arena.actual for name, arena in host.arenas.items() if arena.actual})
    assert host.peak <= host.budget
    other = bytearray(1 << 30)
    other[::4096] = b"x" * (1 << 18)
    try:
        llm.generate("one more", params, progress=False)
    except MoedgeError as error:
        print(type(error).__name__, error.exit_code.name, len(error.result[0].outputs[0].token_ids), error)
try:
    LLM(model, ram="1300MiB", max_model_len=256, rows=2000, prompt_tokens=20, output_tokens=8)
except MoedgeError as error:
    print(type(error).__name__, error)
del other
with LLM(model, ram="1300MiB", max_model_len=256, rows=10) as llm:
    print("the peak counts from loading:", llm.memory.tiers["host"].over_budget)
"""


@pytest.mark.slow
def test_budgets_hold_with_thousands_of_prompts_and_what_is_above_raises(checkpoint: Callable[[str], Path]) -> None:
    used, over, before, again = python(BUDGET, ROOT, str(checkpoint("llama"))).splitlines()
    assert "'KV cache'" in used
    assert re.match(r"OverBudget GAVE_OUT 4 \d\.\d\d GiB of RAM were used, and the budget is 1\.27 GiB", over)
    assert re.match(r"DoesNotFit the rehearsed pass took .* and the budget is 1,300 MiB", before)
    assert again.endswith("False")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_every_example_of_a_page_runs(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    examples = blocks(page)
    assert examples
    shown = python("\n".join(examples), tmp_path)
    assert "In the beginning" in shown
    if page == "docs/python.md":
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
        assert all((tmp_path / f"{name}.answers.jsonl").exists() for name in ("one", "two"))
        assert "too little for this model" in shown


@pytest.mark.slow
def test_a_wheel_has_every_module_and_the_types(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no wheel can be built here: {made.stderr[-200:]}")
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"moedge/__init__.py", "moedge/__main__.py", "moedge/py.typed", "moedge/llm.py"} <= names
    assert "moedge/demo/model/config.json" in names
    assert not any(name.startswith(("api/", "tests/")) for name in names)
