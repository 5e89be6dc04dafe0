"""What is refused is refused before any large library is imported (`cli/`, `api/`), and the first line comes before
that too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., int]
# Runs commands one after the other where large libraries cannot be imported: they take longer than a refusal may.
WITHOUT_LIBRARIES = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(["torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "jinja2"])
from moedge.cli.main import main
results = []
for arguments in json.load(sys.stdin):
    sys.argv, stderr, code = ["moedge", *arguments], io.StringIO(), 0
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    results.append([code, stderr.getvalue()])
json.dump(results, sys.stdout)
"""
MODEL = str(Path(__file__).parents[2] / "examples" / "tiny_moe" / "model")
REFUSALS: list[tuple[list[str], int, str]] = [
    (["batch", "no-such-model", "in.jsonl", "-o", "out.jsonl"], 5, "neither a folder nor a hub id"),
    (["batch", "models/tiny.gguf", "in.jsonl", "-o", "out.jsonl"], 5, "not GGUF"),
    (["batch", "models/model.safetensors", "in.jsonl", "-o", "out.jsonl"], 5, "is a file; give the folder"),
    (["batch", "models/gone.safetensors", "in.jsonl", "-o", "out.jsonl"], 5, "names a file; give the folder"),
    (["batch", "models", "in.jsonl", "-o", "out.jsonl"], 5, "give one of them, such as models/tiny.gguf"),
    (["batch", MODEL, "bad.jsonl", "-o", "out.jsonl"], 7, "invalid_json_line"),
    (["batch", MODEL, "missing.jsonl", "-o", "out.jsonl"], 7, "missing.jsonl"),
    (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--until", "noon"], 2, "--until noon"),
    (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--quant", "int5"], 2, "'--quant': 'int5' is not one of"),
    (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--host-kv", "5parsecs"], 2, "size or off: '5parsecs' is not a"),
    (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--id-column", "key"], 7, "the column 'key' of --id-column is"),
    (["batch", MODEL, "in.jsonl", "-o", "in.jsonl"], 2, "in.jsonl"),
    (["run", "no-such-model", "hello"], 5, "neither a folder nor a hub id"),
    (["prepare", "no-such-model"], 5, "neither a folder nor a hub id"),
    (["plan", "models/tiny.gguf"], 5, "not GGUF"),
    (["plan", MODEL, "in.jsonl", "--gpu", "RTX 9999"], 4, "no preset for the GPU 'RTX 9999'"),
    (["plan", MODEL, "in.jsonl", "--machine", "in.jsonl"], 4, "holds no undamaged profile"),
    (["eval", MODEL, "--tasks", "no_such_task"], 2, "lm-eval has no task no_such_task"),
]


# Questions are templates, so Jinja is there.
DOCUMENTS: list[tuple[list[str], int, str]] = [
    (["docs", "no-such-model", "models", "-o", "out.csv", "--task", "summarize"], 5, "neither a folder nor a hub id"),
    (["docs", MODEL, "absent", "-o", "out.csv", "--task", "summarize"], 2, "absent does not exist; give a folder"),
    (["docs", MODEL, "models", "-o", "out.csv"], 2, "nothing is asked"),
    (["docs", MODEL, "empty", "-o", "out.csv", "--task", "summarize"], 7, "empty has no file to read; 0 were skipped"),
]
# Budgets are refused by what plans are made of, which takes numpy.
BUDGETS: list[tuple[list[str], int, str]] = [
    (
        ["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--gpu-mem", "0", "--ram", "10MiB"],
        4,
        "one token; --ram ",
    ),
    (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--ram", "999TiB"], 2, "is more than this machine has"),
    (
        ["docs", MODEL, "texts", "-o", "out.csv", "--task", "summarize", "--gpu-mem", "0", "--ram", "10MiB"],
        4,
        "one token; --ram ",
    ),
]


def without_libraries(commands: list[list[str]], cwd: Path, program: str = WITHOUT_LIBRARIES) -> list[tuple[int, str]]:
    """Exit codes and standard errors of commands, in a process that has none of the large libraries."""
    home = {"HOME": str(cwd), "XDG_CACHE_HOME": str(cwd), "XDG_CONFIG_HOME": str(cwd), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(commands),
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | home,
    )
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout)
    return [(code, stderr) for code, stderr in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").touch()
    (tmp_path / "models" / "model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(("name", "value", "boxes"), [("NO_COLOR", "1", 0), ("TERM", "dumb", 0), ("TERM", "xterm", 1)])
def test_usage_errors_have_boxes_on_terminals_that_can_draw_them(
    name: str, value: str, boxes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    [(code, stderr)] = without_libraries([["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--ram", "8"]], folder)
    assert (code, stderr.count("╭")) == (2, boxes)
    assert "'8' is not a size" in stderr


def test_refusals_need_no_large_library(folder: Path) -> None:
    results = without_libraries([arguments for arguments, _, _ in REFUSALS], folder)
    found = {
        " ".join(arguments): (code, says if says in stderr else stderr)
        for (arguments, _, says), (code, stderr) in zip(REFUSALS, results, strict=True)
    }
    assert found == {" ".join(arguments): (code, says) for arguments, code, says in REFUSALS}


def test_questions_about_documents_are_refused_before_torch(folder: Path) -> None:
    program = WITHOUT_LIBRARIES.replace(', "jinja2"', "")
    results = without_libraries([arguments for arguments, _, _ in DOCUMENTS], folder, program)
    for (_, code, says), (ended, stderr) in zip(DOCUMENTS, results, strict=True):
        assert (ended, says in stderr) == (code, True), stderr
        assert stderr.startswith("computing on the CPU ("), "the first line"


def test_a_budget_below_that_of_any_row_is_refused_before_torch(folder: Path) -> None:
    program = WITHOUT_LIBRARIES.replace(', "jinja2"', "").replace('"numpy", ', "")
    results = without_libraries([arguments for arguments, _, _ in BUDGETS], folder, program)
    for (_, code, says), (ended, stderr) in zip(BUDGETS, results, strict=True):
        assert (ended, says in stderr) == (code, True), stderr


def test_a_finished_job_is_recognised_without_libraries(folder: Path, cli: Cli) -> None:
    job = ["batch", MODEL, str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--max-tokens", "2"]
    assert cli(*job, "-q") == 0
    ((code, stderr),) = without_libraries([job], folder)
    assert (code, "1 answer in" in stderr) == (0, True), stderr


def test_the_first_lines_come_before_torch(folder: Path) -> None:
    job = ["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--gpu-mem", "0"]
    ((code, stderr),) = without_libraries([job], folder)
    assert code == 1, "a job that runs needs torch"
    first, second = stderr.splitlines()[:2]
    assert first.startswith("computing on the CPU (")
    assert first.endswith("): --gpu-mem 0")
    assert second == "in.jsonl: 1 row: all valid (1 short)"
    ((code, stderr),) = without_libraries([["plan", MODEL, "in.jsonl"]], folder)
    assert (code, stderr.splitlines()[0]) == (1, "counting the tokens of in.jsonl")
