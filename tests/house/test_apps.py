"""Applications (`apps/`) stand on the public names of the core (`api/face.py`, `cli/face.py`): each can be left out,
and the rest runs.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moedge import face
from moedge.cli import face as cli_face
from support.import_graph import ImportGraph

ROOT = Path(__file__).parents[2]
APPS = sorted(path.name for path in (ROOT / "apps").iterdir() if (path / "__init__.py").exists())
# What applications import of the core, and what their commands import of the command line.
FACES = (face, cli_face)
MOST_NAMES = 150
PUBLIC = {"api.face", "cli.face"}


def interior(graph: ImportGraph) -> list[str]:
    """What applications import beside the faces and their own files."""
    return [
        f"{module} imports {other}"
        for module, imported in sorted(graph.files.items())
        if module.startswith("apps.")
        for other in sorted(imported)
        if other not in PUBLIC and other.split(".")[:2] != module.split(".")[:2]
    ]


def test_applications_import_public_names_only() -> None:
    assert APPS
    assert interior(ImportGraph(ROOT, ("quant", "offload", "moe", "runtime", "apps", "cli", "api"))) == []


def test_every_name_of_a_face_is_used_by_an_application() -> None:
    """A face that grows by names that nobody needs bounds nothing."""
    nodes = [node for path in (ROOT / "apps").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    for names in FACES:
        tail = names.__name__.removeprefix("moedge.")
        used = {each.name for node in imports if node.module == tail for each in node.names}
        assert set(names.__all__) == used
        assert len(used) <= MOST_NAMES


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_face_has_what_it_lists_and_imports_no_torch(face: ModuleType) -> None:
    assert sorted(face.__all__) == face.__all__
    assert all(hasattr(face, name) and not name.startswith("_") for name in face.__all__)
    code = f"import sys, {face.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_application_that_reaches_inside_is_noticed(tmp_path: Path) -> None:
    files = {
        "apps/a/b.py": "from ...face import x\nfrom .c import y\nfrom ...runtime.jobs.folder import z\n",
        "apps/a/c.py": "from ..d import w\n",
    }
    for name in ("apps/a/b.py", "apps/a/c.py", "apps/d/__init__.py", "api/face.py", "runtime/jobs/folder.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
    graph = ImportGraph(tmp_path, ("apps", "runtime"))
    assert interior(graph) == ["apps.a.b imports runtime.jobs.folder", "apps.a.c imports apps.d"]


# One process for all cases, each of which is a fork of it: what is large and not moedge's is imported once.
HIDDEN = """
import contextlib
import gc
import io
import json
import os
import sys
from importlib.abc import MetaPathFinder

import torch
import typer
from transformers import modeling_utils
from transformers.models.auto import tokenization_auto

class Hidden(MetaPathFinder):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        if name.startswith("moedge.apps.") and name.split(".")[2] in self.names:
            raise ModuleNotFoundError(name, name=name)

def tried(names, commands, looked_at):
    sys.meta_path.insert(0, Hidden(names))
    from moedge import plan_report
    from moedge.cli.main import main
    # What a report of a plan has beside it takes dozens of plans.
    for name in ("by_budget", "by_sequences", "suggestions"):
        setattr(plan_report, name, lambda *arguments: [])
    codes = []
    for arguments in commands:
        sys.argv = ["moedge", *arguments]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                main()
        except SystemExit as ended:
            codes.append(ended.code or 0)
    import moedge
    missing = [name for name in looked_at or moedge.__all__ if not hasattr(moedge, name)]
    print(json.dumps([codes, missing]), flush=True)

# No child walks through what is here.
gc.freeze()
assert not any(name == "moedge" or name.startswith("moedge.") for name in sys.modules)
for case in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        tried(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""
# Public names that are an application's.
NAMES = {"documents": ["Chunk", "Document", "UnreadDocument", "iter_documents", "run_documents", "split"]}


def left_out(cases: list[tuple[list[str], bool]], folder: Path) -> None:
    """In each case, without these applications, the rest imports and, if asked to, plans and answers a row."""
    model, rows = ROOT / "examples" / "tiny_moe" / "model", folder / "in.jsonl"
    rows.write_text('{"prompt": "In the beginning", "max_tokens": 3}\n')
    budget = ("--ram", "1GiB", "--gpu-mem", "0")
    tried = []
    for index, (names, runs) in enumerate(cases):
        commands = [["--help"], ["jobs", "ls"]]
        if runs:
            commands += [["plan", model, rows, *budget]]
            commands += [["batch", model, rows, "-o", folder / f"{index}.jsonl", "-q", *budget]]
        # All public names are those of an engine, too.
        tried.append((names, commands, [] if runs else [each for found in NAMES.values() for each in found]))
    line = [sys.executable, "-c", HIDDEN, json.dumps(tried, default=str)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for index, ((names, commands, _), (codes, missing)) in enumerate(zip(tried, found, strict=True)):
        assert codes == [0] * len(commands), (names, done.stderr)
        assert sorted(missing) == sorted(each for name in names for each in NAMES.get(name, []))
        assert not cases[index][1] or len((folder / f"{index}.jsonl").read_text().splitlines()) == 1


def test_applications_can_be_left_out(tmp_path: Path) -> None:
    """All of them, and each alone; the rest imports and, without any of them, plans and runs a job."""
    left_out([(APPS, True), *(([name], False) for name in APPS)], tmp_path)


@pytest.mark.slow
def test_jobs_run_without_any_one_application(tmp_path: Path) -> None:
    left_out([([name], True) for name in APPS], tmp_path)
