"""What is refused is refused before torch is imported, and the first line comes before that too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# An import of torch or transformers ends the process with a code that no refusal has.
BLOCKED = """
import os, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            print("IMPORTED", name, file=sys.stderr, flush=True)
            os._exit(99)
sys.meta_path.insert(0, Block())
from moedge.cli.main import main
main()
"""
MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"


def moedge(*arguments: object, cwd: Path, blocked: bool = True) -> subprocess.CompletedProcess[str]:
    program = ["-c", BLOCKED] if blocked else ["-m", "moedge.cli"]
    command = [sys.executable, *program, *map(str, arguments)]
    home = {"HOME": str(cwd), "XDG_STATE_HOME": str(cwd), "XDG_CACHE_HOME": str(cwd), "XDG_CONFIG_HOME": str(cwd)}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=cwd, env=os.environ | home | {"HF_HUB_OFFLINE": "1"}
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt": "hello"}) + "\n")
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["batch", "no-such-model", "in.jsonl", "-o", "out.jsonl"], 5, "neither a folder nor a hub id"),
        (["batch", "models/tiny.gguf", "in.jsonl", "-o", "out.jsonl"], 5, "is a GGUF file"),
        (["batch", MODEL, "bad.jsonl", "-o", "out.jsonl"], 7, "invalid_json_line"),
        (["batch", MODEL, "missing.jsonl", "-o", "out.jsonl"], 7, "missing.jsonl"),
        (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--until", "noon"], 2, "--until noon"),
        (["batch", MODEL, "in.jsonl", "-o", "out.jsonl", "--quant", "int5"], 2, "int5"),
        (["batch", MODEL, "in.jsonl", "-o", "in.jsonl"], 2, "in.jsonl"),
        (["run", "no-such-model", "hello"], 5, "neither a folder nor a hub id"),
        (["prepare", "no-such-model"], 5, "neither a folder nor a hub id"),
        (["plan", "models/tiny.gguf"], 5, "is a GGUF file"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, list) else "",
)
def test_a_refusal_imports_no_torch(
    arguments: list[object], code: int, says: str, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").touch()
    (tmp_path / "bad.jsonl").write_text('{"prompt": \n')
    ended = moedge(*arguments, cwd=tmp_path)
    assert says in ended.stderr
    assert ended.returncode == code, ended.stderr


def test_a_finished_job_is_recognised_without_torch(rows: Path, tmp_path: Path) -> None:
    job = ["batch", MODEL, rows, "-o", "out.jsonl", "--max-tokens", "2"]
    first = moedge(*job, cwd=tmp_path, blocked=False)
    assert first.returncode == 0, first.stderr
    again = moedge(*job, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "1 answer in" in again.stderr


def test_the_first_line_says_what_computes_before_torch_is_imported(rows: Path, tmp_path: Path) -> None:
    ended = moedge("batch", MODEL, rows, "-o", "out.jsonl", "--gpu-mem", "0", cwd=tmp_path)
    assert ended.returncode == 99, "a job that runs needs torch"
    first, second = ended.stderr.splitlines()[:2]
    assert first.startswith("computing on the CPU (")
    assert first.endswith("): --gpu-mem 0")
    assert second == f"{rows}: 1 row (1 short)"
