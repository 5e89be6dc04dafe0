"""Keys and tokens that are in the environment or on the command line stand in no file that a run leaves
(`runtime/jobs/journal/run_log.py`).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from moedge.cli.main import app
from moedge.cli.options.configured_command import ISA_VARIABLE, PROFILE_VARIABLE, configured_commands
from moedge.runtime.jobs.journal.run_log import SHOWN_VARIABLES, command_line

# Of moedge, of what it fetches models with, and of programs that are often run beside it.
SECRETS = (
    "MOEDGE_API_KEY", "MOEDGE_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DATABASE_PASSWORD",
)  # fmt: skip
BUDGET = ("--ram", "3GiB", "--gpu-mem", "0", "--dtype", "fp32", "--quant", "none")


def secret(name: str) -> str:
    return f"secret-of-{name.lower()}-0123456789"


def leaking(folder: Path) -> set[tuple[str, str]]:
    """The secrets in files below a folder, each with its file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {
        (name, str(path.relative_to(folder)))
        for path in files
        for name in SECRETS
        if secret(name).encode() in path.read_bytes()
    }


def run(folder: Path, *arguments: object) -> str:
    homes = {f"XDG_{kind}_HOME": str(folder / "home" / kind) for kind in ("STATE", "CACHE", "DATA", "CONFIG")}
    environment = {**os.environ, **homes, **{name: secret(name) for name in SECRETS}}
    command = [sys.executable, "-m", "moedge", *map(str, arguments)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_no_run_leaves_a_secret_in_a_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoint("qwen3_moe")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "hi", "max_tokens": 2}\n')
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "one.txt").write_text("A text of a few words.")
    said = run(tmp_path, "batch", model, "rows.jsonl", "-o", "out.jsonl", *BUDGET)
    said += run(tmp_path, "report", "out.job", "-o", "report.html")
    said += run(
        tmp_path, "docs", model, "papers", "-o", "docs.csv", "--prompt", "Say it: {text}", "--max-tokens", 2, *BUDGET
    )
    said += run(tmp_path, "prepare", model, "--quant", "int4", "--disk-dir", "stores")
    said += run(tmp_path, "jobs", "show", "out.job")
    assert (tmp_path / "out.job" / "runs.jsonl").is_file()
    assert not leaking(tmp_path)
    assert "secret-of" not in said


@pytest.mark.parametrize("key", [["--api-key", "0123456789abcdef0"], ["--api-key=0123456789abcdef0"],
                                 ["--api-key", "0123456789abcdef0 it's"]])  # fmt: skip
def test_a_key_that_was_typed_is_not_in_the_command(key: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["moedge", "serve", "a model", *key, "--port", "0"])
    for name in os.environ:
        monkeypatch.delenv(name) if name.startswith("MOEDGE_") else None
    monkeypatch.setenv("MOEDGE_API_KEY", secret("MOEDGE_API_KEY"))
    monkeypatch.setenv("MOEDGE_RAM", "3GiB")
    assert command_line() == "MOEDGE_RAM=3GiB moedge serve 'a model' --port 0"


def test_every_variable_that_is_not_secret_is_in_the_command() -> None:
    commands = configured_commands(typer.main.get_command(app))
    options = {option.envvar for command in commands.values() for option in command.options.values()}
    assert options - {"MOEDGE_API_KEY"} | {PROFILE_VARIABLE, ISA_VARIABLE} == SHOWN_VARIABLES
