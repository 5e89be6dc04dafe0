"""A command whose extra is not installed is refused (`runtime/settings/errors.py`): exit code 6, and the line that
installs it.
"""

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.runtime.settings.errors import install_line

# Before moedge is imported: modules of an extra cannot be found, as where it is not installed.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}.split(","):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
find = importlib.util.find_spec
blocked = lambda name: name.partition(".")[0] in {blocked!r}.split(",")
importlib.util.find_spec = lambda name, *rest: None if blocked(name) else find(name, *rest)
from moedge.__main__ import main
main()
"""
ROW = {"id": "a", "prompt": "Hello"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def run(blocked: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(blocked=blocked)
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "json.jsonl").write_text(json.dumps(ROW | {"response_format": SCHEMA}) + "\n")
    (tmp_path / "plain.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "rows.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    # One tensor `a` of 32 float32, no keys.
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"a", 1, 32, 0, 0)
    (tmp_path / "model.gguf").write_bytes(header.ljust(96, b"\0") + bytes(128))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.pdf").write_bytes(b"%PDF-1.7")
    return tmp_path


CASES = {
    "json": ("llguidance", "batch MODEL json.jsonl -o out.jsonl"),
    "parquet": ("pyarrow", "batch MODEL rows.parquet -o out.jsonl"),
    "parquet as output": ("pyarrow", "batch MODEL plain.jsonl -o out.parquet"),
    "zst": ("zstandard", "batch MODEL rows.jsonl.zst -o out.jsonl"),
    "docs": ("pypdfium2", "docs MODEL files -o out.jsonl --prompt What?"),
    "formats": ("gguf", "plan model.gguf"),
    "serve": ("fastapi", "serve MODEL"),
    "eval": ("lm_eval", "eval MODEL --tasks arc_easy"),
    "ray": ("ray", "batch MODEL plain.jsonl -o out.jsonl --ray local"),
}


@pytest.mark.sample("json", "docs", "formats")
@pytest.mark.parametrize("name", CASES)
def test_a_missing_extra_names_its_install_line(name: str, folder: Path, checkpoint: Callable[[str], Path]) -> None:
    blocked, words = CASES[name]
    arguments = [str(checkpoint("llama")) if word == "MODEL" else word for word in words.split()]
    done = run(blocked, folder, *arguments)
    assert done.returncode == 6, done.stderr
    said = " ".join(done.stderr.split())
    assert "which is not installed: " in said
    assert " ".join(install_line(name.split(maxsplit=1)[0]).split()) in said
    assert "Traceback" not in said
    assert not (folder / "out.jsonl").exists()


def test_all_has_every_extra_that_needs_no_cluster() -> None:
    extras = {name.split()[0] for name in CASES} - {"ray"}
    needed = {package for extra in extras for package in shlex.split(install_line(extra))[2:]}
    assert needed <= set(shlex.split(install_line("all")))
    assert any(package.startswith("ray[data]>=") for package in shlex.split(install_line("ray")))
